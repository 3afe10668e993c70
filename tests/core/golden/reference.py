"""The formulas again, row by row and step by step in fp64 NumPy: what the product is compared with.

It shares no code with the product and takes no short cut: one row, one denoise step at a time.  Weights may
be complex: ``gradient`` takes the imaginary part of the loss at ``weights + i h`` (complex-step
differentiation, Squire and Trapp 1998), which is exact to rounding.  What the formulas exempt from the
gradient, and every comparison, therefore looks at real parts alone.

Shape legend: S sequence, C channel, B rows, T trained denoise steps, N noise levels; P parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

Weights = dict[str, np.ndarray]
A = np.ndarray  # one row's latents [S, C], or the arrays of a chunk


# -- schedule and samplers ------------------------------------------------------------------------------


def schedule(steps: int, shift: float) -> list[float]:
    """SD3's shift of a linear schedule (arXiv 2403.03206, eq. 23), each sigma stored in fp32."""
    sigmas = []
    for index in range(steps + 1):
        u = 1.0 - index / steps
        sigmas.append(float(np.float32(shift * u / (1.0 + (shift - 1.0) * u))))
    return sigmas


def diffusion(kind: str, a: float, sigmas: Sequence[float], step: int) -> float:
    """``g`` of one denoise step."""
    s = sigmas[step]
    if kind == "dance_sde":
        return a
    below = 1.0 - sigmas[1] if s == 1.0 else 1.0 - s
    return a * math.sqrt(s / below)


def mean(kind: str, a: float, sigmas: Sequence[float], step: int, x: A, v: A) -> A:
    s, after = sigmas[step], sigmas[step + 1]
    dt = after - s
    if kind == "ode":
        return x + v * dt
    if kind == "cps":
        std = after * math.sin(a * math.pi / 2)
        clean, noise = x - s * v, x + (1 - s) * v
        return (1 - after) * clean + math.sqrt(after**2 - std**2) * noise
    g = diffusion(kind, a, sigmas, step)
    return x * (1 + g**2 * dt / (2 * s)) + v * (1 + g**2 * (1 - s) / (2 * s)) * dt


def std(kind: str, a: float, sigmas: Sequence[float], step: int) -> float:
    s, after = sigmas[step], sigmas[step + 1]
    if kind == "ode":
        return 0.0
    if kind == "cps":
        return after * math.sin(a * math.pi / 2)
    return diffusion(kind, a, sigmas, step) * math.sqrt(s - after)


def log_prob(kind: str, x_next: A, mu: A, deviation: float) -> complex:
    """A mean over all dimensions; unnormalised under ``cps``."""
    total = 0.0 + 0.0j
    for got, expected in zip(x_next.flat, mu.flat, strict=True):
        if kind == "cps":
            total += -((got - expected) ** 2)
        else:
            total += -((got - expected) ** 2) / (2 * deviation**2)
            total += -math.log(deviation) - 0.5 * math.log(2 * math.pi)
    return total / x_next.size


# -- the linear model -----------------------------------------------------------------------------------


def velocity(weights: Weights, x: A, sigma: float, text: A) -> A:
    """``v = x W + sigma b + t U`` of one row; ``text`` is ``[D]``."""
    return x @ weights["on_x"] + sigma * weights["on_sigma"] + text @ weights["on_text"]


def gradient(loss: Callable[[Weights], complex], weights: Weights, h: float = 1e-30) -> Weights:
    """d loss / d weights, one parameter at a time."""
    result = {}
    for name, array in weights.items():
        slopes = np.zeros(array.shape)
        for place in np.ndindex(array.shape):
            moved = {key: value.astype(complex) for key, value in weights.items()}
            moved[name][place] += 1j * h
            slopes[place] = loss(moved).imag / h
        result[name] = slopes
    return result


# -- losses on log-probabilities ------------------------------------------------------------------------


class Recorded:
    """A chunk's recorded steps: ``x`` ``[B, T + 1, S, C]``, ``steps`` ``[B, T]``, ``text`` ``[B, D]``."""

    def __init__(self, kind: str, a: float, sigmas: Sequence[float], x: A, steps: A, text: A) -> None:
        self.kind, self.a, self.sigmas = kind, a, sigmas
        self.x, self.steps, self.text = x, steps, text

    def mean(self, weights: Weights, row: int, place: int) -> A:
        step, x = int(self.steps[row, place]), self.x[row, place]
        v = velocity(weights, x, self.sigmas[step], self.text[row])
        return mean(self.kind, self.a, self.sigmas, step, x, v)

    def std(self, row: int, place: int) -> float:
        return std(self.kind, self.a, self.sigmas, int(self.steps[row, place]))

    def minus_dt(self, row: int, place: int) -> float:
        step = int(self.steps[row, place])
        return self.sigmas[step] - self.sigmas[step + 1]

    def log_prob(self, weights: Weights, row: int, place: int) -> complex:
        mu = self.mean(weights, row, place)
        return log_prob(self.kind, self.x[row, place + 1], mu, self.std(row, place))

    def log_probs(self, weights: Weights) -> A:
        rows, timesteps = self.steps.shape
        return np.array(
            [[self.log_prob(weights, row, t).real for t in range(timesteps)] for row in range(rows)]
        )


def clipped(ratio: complex, advantage: float, low: float, high: float) -> complex:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``."""
    bounded = ratio
    if ratio.real < 1 - low:
        bounded = 1 - low
    if ratio.real > 1 + high:
        bounded = 1 + high
    first, second = -advantage * ratio, -advantage * bounded
    return first if first.real >= second.real else second


def guard_ratio_as_defined(
    seen: Recorded, weights: Weights, old: Weights, row: int, place: int
) -> tuple[complex, complex]:
    """``r = exp((logp - logp_old + b) S)``, ``b = mean((mu - mu_old)²) / 2 S²``, and its exponent."""
    deviation = seen.std(row, place)
    mu, mu_old = seen.mean(weights, row, place), seen.mean(old, row, place).real
    b = ((mu - mu_old) ** 2).sum() / mu.size / (2 * deviation**2)
    now, then = seen.log_prob(weights, row, place), seen.log_prob(old, row, place).real
    exponent = (now - then + b) * deviation
    return np.exp(exponent), exponent


def guard_ratio_as_computed(
    seen: Recorded, weights: Weights, old: Weights, row: int, place: int
) -> tuple[complex, complex]:
    """``r = exp(mean((mu - mu_old) xi))`` with the noise ``xi`` of the rollout, and its exponent."""
    mu, mu_old = seen.mean(weights, row, place), seen.mean(old, row, place).real
    xi = (seen.x[row, place + 1] - mu_old) / seen.std(row, place)
    exponent = ((mu - mu_old) * xi).sum() / mu.size
    return np.exp(exponent), exponent


def kl(seen: Recorded, weights: Weights, base: Weights, row: int, place: int, form: str) -> complex:
    """``mean((mu - mu_ref)²)`` over ``2 S²``, or over ``2 g²``; ``cps`` has no g."""
    difference = seen.mean(weights, row, place) - seen.mean(base, row, place).real
    squared = (difference**2).sum() / difference.size
    if form == "per_step" or seen.kind == "cps":
        return squared / (2 * seen.std(row, place) ** 2)
    g = diffusion(seen.kind, seen.a, seen.sigmas, int(seen.steps[row, place]))
    return squared / (2 * g**2)


def policy_gradient_loss(
    seen: Recorded,
    weights: Weights,
    old: Weights,
    base: Weights,
    advantages: Sequence[float],
    *,
    loss: str,
    clip_low: float,
    clip_high: float,
    kl_weight: float,
    kl_form: str,
    importance: A | None = None,
) -> complex:
    """The chunk's loss: a mean over rows and trained steps.  ``importance`` ``[B, T]`` weighs each."""
    total = 0.0 + 0.0j
    rows, timesteps = seen.steps.shape
    for row in range(rows):
        for place in range(timesteps):
            if loss == "grpo":
                then = seen.log_prob(old, row, place).real
                ratio = np.exp(seen.log_prob(weights, row, place) - then)
                term = clipped(ratio, advantages[row], clip_low, clip_high)
            else:
                ratio, _ = guard_ratio_as_defined(seen, weights, old, row, place)
                term = clipped(ratio, advantages[row], clip_low, clip_high) / seen.minus_dt(row, place)
            if importance is not None:
                term *= importance[row, place]
            total += term
            if kl_weight:
                total += kl_weight * kl(seen, weights, base, row, place, kl_form)
    return total / (rows * timesteps)


# -- DiffusionNFT ---------------------------------------------------------------------------------------


def nft_loss(
    weights: Weights,
    old: Weights,
    base: Weights,
    x0: A,
    text: A,
    levels: A,
    noise: A,
    advantages: Sequence[float],
    *,
    beta: float,
    kl_weight: float,
    largest: float,
) -> complex:
    """``x0`` ``[B, S, C]``, ``levels`` ``[B, N]``, ``noise`` ``[N, B, S, C]``."""
    total = 0.0 + 0.0j
    rows, count = levels.shape
    for row in range(rows):
        q = min(max(advantages[row] / (2 * largest) + 0.5, 0.0), 1.0)
        for place in range(count):
            t, clean = float(levels[row, place]), x0[row]
            x_t = (1 - t) * clean + t * noise[place, row]
            v = velocity(weights, x_t, t, text[row])
            v_old = velocity(old, x_t, t, text[row]).real
            positive = nft_match(beta * v + (1 - beta) * v_old, x_t, clean, t)
            negative = nft_match((1 + beta) * v_old - beta * v, x_t, clean, t)
            total += largest * (q * positive + (1 - q) * negative) / beta
            if kl_weight:
                difference = v - velocity(base, x_t, t, text[row]).real
                total += kl_weight * (difference**2).sum() / difference.size
    return total / (rows * count)


def nft_match(v: A, x_t: A, x0: A, t: float) -> complex:
    """Squared error of the predicted ``x0`` over its own mean size, which has no gradient."""
    error = x_t - t * v - x0
    weight = max(np.abs(error.real).sum() / error.size, 1e-5)
    return (error**2).sum() / error.size / weight


def old_decay(kind: int, n: int) -> float:
    if kind == 1:
        return 0.5 if n > 500 else 0.001 * n
    if kind == 2 and n >= 75:
        return min(0.0075 * (n - 75), 0.999)
    return 0.0


def averaged(start: float, values: Sequence[float], d: float, interval: int) -> float:
    """EMA of a scalar after the optimizer steps that gave ``values``."""
    average = start
    for t, value in enumerate(values):
        if (t + 1) % interval == 0:
            decay = min((1 + t) / (10 + t), d)
            average = decay * average + (1 - decay) * value
    return average


# -- advantages -----------------------------------------------------------------------------------------


def deviation_of(rewards: Sequence[float], kind: str) -> float:
    centre = sum(rewards) / len(rewards)
    squares = sum((reward - centre) ** 2 for reward in rewards)
    return math.sqrt(squares / (len(rewards) - (1 if kind == "sample" else 0)))


def advantages(groups: Sequence[Sequence[float]], std_over: str, kind: str, clip: float) -> list[list[float]]:
    """``(R - mean) / (std + 1e-4)``, clipped; no division with ``none``; zeros for a constant group."""
    everyone = [reward for group in groups for reward in group]
    result = []
    for group in groups:
        if all(reward == group[0] for reward in group):
            result.append([0.0] * len(group))
            continue
        centre = sum(group) / len(group)
        divisor = 1.0
        if std_over == "group":
            divisor = deviation_of(group, kind) + 1e-4
        elif std_over == "global":
            divisor = deviation_of(everyone, kind) + 1e-4
        result.append([min(max((reward - centre) / divisor, -clip), clip) for reward in group])
    return result


def combined(
    parts: Sequence[Mapping[str, Sequence[float]]],
    weights: Mapping[str, float],
    std_over: str,
    kind: str,
    clip: float,
) -> list[list[float]]:
    """Each reward's advantages alone, added by weight and clipped again."""
    totals = [[0.0] * len(next(iter(group.values()))) for group in parts]
    for name, weight in weights.items():
        alone = advantages([group[name] for group in parts], std_over, kind, clip)
        for number, row in enumerate(alone):
            for place, value in enumerate(row):
                totals[number][place] += weight * value
    return [[min(max(value, -clip), clip) for value in row] for row in totals]
