"""A real Slurm and a real Ray cluster on this machine, for as long as a test needs them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from waiting import wait_until

CONFIG = """\
ClusterName=headgate
SlurmctldHost={host}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_interval=1,sched_min_interval=0
NodeName={host} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return "" if os.geteuid() == 0 else "Slurm is started by root alone here"


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch speaks to a cluster of this one machine."""
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munge insists on a folder that others may enter and not write to
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    ports = {"controller": _free_port(), "node": _free_port()}
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]
    running = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("wb") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            time.sleep(0.5)
        wait_until(lambda: b"idle" in subprocess.run(["sinfo"], env=environment, capture_output=True).stdout)
        yield environment
    finally:
        subprocess.run(["scancel", "--me"], env=environment, capture_output=True)
        for process in reversed(running):
            process.terminate()
            process.wait()


@contextmanager
def ray(folder: Path) -> Iterator[Any]:
    """A cluster of a head without processors and two nodes with one each, by Ray's own means for tests: the
    address is its `address`, and a node of it can be removed without ceremony."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)},
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("", 0))
        return int(opened.getsockname()[1])
