"""What denoising costs on this machine, measured: the numbers that planners and the simulator go by."""
