"""Where a study's runs are carried out: on this machine, on Slurm or on Ray."""
