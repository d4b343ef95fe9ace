"""TunePlane: training on Slurm, from a committed experiment to its curve."""

__version__ = "0.5.0.dev0"
