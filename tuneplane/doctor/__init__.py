"""`tp doctor`: what runs need of this machine, of the site's Slurm and, by a one-minute job, of its nodes.

`checkup.py` asks every look in turn; `machine.py`, `lab.py`, `cluster.py` and `node.py` look.
"""
