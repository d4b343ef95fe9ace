"""A first cluster profile of a site that nobody has described: asked of Slurm, and proved by `sbatch --test-only`.

`tp cluster discover` asks (`said.py`), reads (`slurm.py`), decides (`choice.py`) and writes (`profile.py`);
`tp cluster check` and `tp doctor` prove a profile (`check.py`).
"""
