"""Starting runs and knowing how they are: script text, Slurm through submitit, this machine, states."""
