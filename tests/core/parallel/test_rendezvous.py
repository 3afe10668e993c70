"""Where a node's processes meet: who may join, what is left behind, and what is refused."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from spotlight_core.errors import BadInputError
from spotlight_core.parallel import table
from spotlight_core.parallel.communicator import GroupBrokenError
from spotlight_core.parallel.processes import is_alive, own_identity, start_ticks
from spotlight_core.parallel.rendezvous import NodeRendezvous
from spotlight_core.parallel.table import OWNER_NAMESPACE, NodeTable

DEAD_PID = 2**22 + 1  # above any that Linux gives

OWNER = """
import sys, time
from pathlib import Path
from spotlight_core.parallel.rendezvous import NodeRendezvous
NodeRendezvous.create(Path(sys.argv[1]), 2)
print("torch" in sys.modules, flush=True)
time.sleep(600)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeRendezvous]:
    rendezvous = NodeRendezvous.create(tmp_path / "node", 3)
    yield rendezvous
    rendezvous.close()


@pytest.fixture
def ranks(node: NodeRendezvous) -> Iterator[list[NodeRendezvous]]:
    """Two ranks, both of this process, and a slot to spare."""
    ranks = [NodeRendezvous.join(node.path, rank) for rank in range(2)]
    yield ranks
    for rank in ranks:
        rank.close()


def owner_process(path: Path) -> "subprocess.Popen[str]":
    """Another process that owns a rendezvous; asserts that it needed no torch."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, path], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "False\n"
    return owner


def test_a_process_is_told_by_number_and_start_and_a_killed_one_is_gone_before_it_is_waited_for() -> None:
    assert is_alive(*own_identity())
    pid, ticks = own_identity()
    assert not is_alive(pid, ticks - 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ticks = start_ticks(child.pid) or 0
    assert is_alive(child.pid, ticks)
    child.kill()
    while is_alive(child.pid, ticks):
        time.sleep(0.005)
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


def test_what_a_killed_owner_left_is_refused_by_ranks_and_swept_by_the_next_owner(tmp_path: Path) -> None:
    owner = owner_process(tmp_path / "first")
    rank = NodeRendezvous.join(tmp_path / "first", 0)
    other = NodeRendezvous.join(tmp_path / "first", 1)
    communicator = rank.communicator((0, 1), 1)
    with pytest.raises(BadInputError, match=r"cannot make a rendezvous at .*first"):
        NodeRendezvous.create(tmp_path / "first", 2)
    owner.kill()
    owner.wait()
    with pytest.raises(GroupBrokenError, match="owner is gone") as broken:
        communicator.all_reduce(torch.zeros(1))  # rank 1 never comes
    assert broken.value.lost == ()
    with pytest.raises(BadInputError, match="is gone"):
        other.take(0)
    (tmp_path / "unlike" / "x").mkdir(parents=True)
    (tmp_path / "unlike" / "table").write_bytes(b"not ours")
    NodeRendezvous.create(tmp_path / "second", 2).close()
    assert [path.name for path in tmp_path.iterdir()] == ["unlike"]
    rank.close()
    other.close()


def test_another_containers_rendezvous_in_the_same_memory_is_let_be(tmp_path: Path) -> None:
    owner = owner_process(tmp_path / "theirs")
    owner.kill()
    owner.wait()
    NodeTable(tmp_path / "theirs").words[OWNER_NAMESPACE] += 1
    NodeRendezvous.create(tmp_path / "ours", 1).close()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_nothing_is_left_when_the_owner_closes(tmp_path: Path) -> None:
    node = NodeRendezvous.create(tmp_path / "node", 1)
    rank = NodeRendezvous.join(node.path, 0)
    assert len(list(node.path.iterdir())) == 2
    node.close()
    assert list(tmp_path.iterdir()) == []
    rank.close()


def test_a_slot_is_one_processs_until_it_leaves(node: NodeRendezvous, ranks: list[NodeRendezvous]) -> None:
    with pytest.raises(BadInputError, match="rank 1 is process"):
        NodeRendezvous.join(node.path, 1)
    with pytest.raises(BadInputError, match="rank 3 of a node with 3 slots"):
        NodeRendezvous.join(node.path, 3)
    with pytest.raises(BadInputError, match="a rendezvous for 33 ranks: give 1 to 32"):
        NodeRendezvous.create(node.path.with_name("other"), 33)
    with pytest.raises(BadInputError, match="no rendezvous at"):
        NodeRendezvous.join(node.path.with_name("nowhere"), 0)
    standby = NodeRendezvous.join(node.path, 2)
    with pytest.raises(BadInputError, match="rank 1 is process"):
        standby.take(1)
    assert sorted(node.pulses()) == [0, 1, 2]
    ranks[1].close()
    standby.take(1)
    assert {rank: pulse.boots for rank, pulse in node.pulses().items()} == {0: 1, 1: 2}
    standby.close()


def test_ranks_beat_and_tell_their_steps(node: NodeRendezvous, ranks: list[NodeRendezvous]) -> None:
    ranks[0].step_done(0.25)
    ranks[0].step_done(0.5)
    first = node.pulses()
    assert (first[0].steps, first[0].step_seconds, first[1].steps) == (2, 0.5, 0)
    while any(now.heartbeat == first[rank].heartbeat for rank, now in node.pulses().items()):
        time.sleep(0.01)


def test_a_communicator_stays_the_same_within_its_generation(ranks: list[NodeRendezvous]) -> None:
    first = ranks[0].communicator((0, 1), 4)
    assert ranks[0].communicator((0, 1), 4) is first
    assert (first.rank, first.size, first.generation) == (0, 2, 4)
    assert ranks[1].communicator((1, 0), 5).rank == 0


@pytest.mark.parametrize("group", [(1, 2), (0, 0), (0, 3), ()])
def test_ranks_that_cannot_be_a_group_are_named(ranks: list[NodeRendezvous], group: tuple[int, ...]) -> None:
    with pytest.raises(BadInputError, match="cannot be in the group"):
        ranks[0].communicator(group, 1)


def test_a_rank_that_has_not_joined_is_lost(ranks: list[NodeRendezvous]) -> None:
    with pytest.raises(GroupBrokenError, match="have not joined") as broken:
        ranks[0].communicator((0, 1, 2), 1)
    assert broken.value.lost == (2,)


def test_an_ended_generation_is_refused_and_a_newer_one_is_not(
    node: NodeRendezvous, ranks: list[NodeRendezvous]
) -> None:
    ranks[0].communicator((0, 1), 2)
    node.end_generation(2)
    with pytest.raises(GroupBrokenError, match="generation 2 was ended") as broken:
        ranks[0].communicator((0, 1), 2).broadcast(torch.zeros(1), 0)
    assert broken.value.lost == ()
    with pytest.raises(GroupBrokenError):
        ranks[1].communicator((0, 1), 2)
    assert ranks[0].communicator((0, 1), 3).size == 2
    node.lose(1, boots=1)
    with pytest.raises(GroupBrokenError, match="lost a member") as broken:
        ranks[0].communicator((0, 1), 3).broadcast(torch.zeros(1), 0)
    assert broken.value.lost == (1,)
    # Alone there is nobody whom a loss could matter to.
    alone = ranks[0].communicator((0,), 4)
    assert alone.broadcast(torch.ones(2), 0).tolist() == [1, 1]
    alone.abort()
    with pytest.raises(GroupBrokenError):
        alone.broadcast(torch.ones(2), 0)


def test_a_loss_that_is_noticed_late_does_not_count_for_the_next_process(node: NodeRendezvous) -> None:
    first = NodeRendezvous.join(node.path, 0)
    NodeRendezvous.join(node.path, 1)
    node.table.words[node.table.slot(0) + table.PID] = DEAD_PID
    before = node.pulses()[0]
    assert not before.alive
    second = NodeRendezvous.join(node.path, 0)
    node.lose(0, before.boots)  # found in the pulses of before
    assert second.communicator((0, 1), 1).size == 2
    first._closed.set()


def test_a_slot_that_changes_hands_is_never_a_dead_process_under_the_next_ones_number(
    node: NodeRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = NodeRendezvous.join(node.path, 0)
    node.table.words[node.table.slot(0) + table.PID] = DEAD_PID
    seen = []

    def look() -> tuple[int, int]:
        seen.append(node.pulses())
        return own_identity()

    monkeypatch.setattr(table, "own_identity", look)  # between the words that the next process writes
    second = NodeRendezvous.join(node.path, 0)
    assert seen == [{}]
    assert node.pulses()[0].alive
    second.close()
    first._closed.set()


def test_only_the_owner_ends_a_generation_and_only_ranks_form_groups(
    node: NodeRendezvous, ranks: list[NodeRendezvous]
) -> None:
    with pytest.raises(BadInputError, match="abort the communicator"):
        ranks[0].end_generation(1)
    with pytest.raises(BadInputError, match="join it as a rank"):
        node.communicator((0, 1), 1)


def test_a_message_that_memory_has_no_room_for_is_an_error_that_says_so(ranks: list[NodeRendezvous]) -> None:
    communicator = ranks[0].communicator((0, 1), 1)
    with pytest.raises(BadInputError, match=r"no room for \S+ MiB of messages in .*: free memory there"):
        communicator.broadcast(torch.zeros(1).expand(2**44), 0)  # a number repeated: 64 TiB on paper
    with pytest.raises(GroupBrokenError):
        ranks[1].communicator((0, 1), 1)
    assert len(list(ranks[0].path.glob("outbox.*"))) == 2


def test_a_folder_without_room_is_an_error_that_says_so() -> None:
    with pytest.raises(BadInputError, match="cannot make a rendezvous at /proc/node"):
        NodeRendezvous.create(Path("/proc/node"), 2)


def test_shapes_that_do_not_agree_end_the_group(ranks: list[NodeRendezvous]) -> None:
    first, second = (rank.communicator((0, 1), 1) for rank in ranks)
    first.broadcast(torch.zeros(3), 0)
    with pytest.raises(ValueError, match=r"rank 0 sent 12 bytes where torch.float32 of shape \(4,\)"):
        second.broadcast(torch.zeros(4), 0)
    with pytest.raises(GroupBrokenError):
        first.broadcast(torch.zeros(3), 0)


def test_a_last_word_is_heard_after_its_sender_went_on(ranks: list[NodeRendezvous]) -> None:
    second = ranks[1].communicator((0, 1), 1)
    ranks[0].communicator((0, 1), 1).broadcast(torch.full((3,), 7), 0)
    ranks[0].communicator((0,), 2)
    assert second.broadcast(torch.zeros(3, dtype=torch.int64), 0).tolist() == [7, 7, 7]
    with pytest.raises(GroupBrokenError, match="older"):
        second.broadcast(torch.zeros(3, dtype=torch.int64), 0)


def test_a_sender_does_not_write_over_a_last_message_that_is_still_to_be_read(
    node: NodeRendezvous, ranks: list[NodeRendezvous]
) -> None:
    late = ranks[1].communicator((0, 1), 1)
    ranks[0].communicator((0, 1), 1).broadcast(torch.full((3,), 7.0), 0)
    alone = ranks[0].communicator((0,), 2)
    with ThreadPoolExecutor(1) as pool:
        next_one = pool.submit(alone.broadcast, torch.zeros(3), 0)
        with pytest.raises(TimeoutError):
            next_one.result(timeout=0.05)
        assert late.broadcast(torch.zeros(3), 0).tolist() == [7.0, 7.0, 7.0]
        assert next_one.result(timeout=10).tolist() == [0.0, 0.0, 0.0]


def test_a_sender_waits_for_nobody_whose_former_group_was_ended_and_that_one_reads_nothing_wrong(
    node: NodeRendezvous, ranks: list[NodeRendezvous]
) -> None:
    late = ranks[1].communicator((0, 1), 1)
    ranks[0].communicator((0, 1), 1).broadcast(torch.zeros(3), 0)
    node.end_generation(1, ranks=(1,))
    alone = ranks[0].communicator((0,), 2)
    assert alone.broadcast(torch.ones(3), 0).tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(GroupBrokenError):
        late.broadcast(torch.zeros(3), 0)


def test_tensors_of_another_device_are_refused_by_name(ranks: list[NodeRendezvous]) -> None:
    with pytest.raises(BadInputError, match=r'a tensor on meta .*: set elastic.communicator = "nccl"'):
        ranks[0].communicator((0, 1), 1).broadcast(torch.zeros(1, device="meta"), 0)
