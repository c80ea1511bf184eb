"""A real Slurm and a real Ray cluster on this machine, for as long as a test needs them."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
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
MessageTimeout=100
TCPTimeout=100
NodeName=one,two NodeHostname={host} Port={one},{two} CPUs=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing_slurm() -> str:
    """Why Slurm cannot be started here; empty if it can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed"
    return "" if os.geteuid() == 0 else "Slurm is started by root alone here"


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch speaks to a cluster of two nodes, both of them this machine."""
    for name in ("state", "munge"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)  # munge insists on a folder that others may enter and not write to
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    ports = dict(zip(("controller", "one", "two"), _free_ports(3), strict=True))
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    socket_path = folder / "munge" / "socket"
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={socket_path}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "one"],
        ["slurmd", "-D", "-N", "two"],
    ]
    running = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.out").open("ab") as out:
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            wait_until(socket_path.exists)
        states = ["sinfo", "--Node", "--noheader", "--format=%T"]
        wait_until(
            lambda: (
                subprocess.run(states, env=environment, capture_output=True).stdout.split() == [b"idle"] * 2
            )
        )
        yield environment
    finally:
        subprocess.run(["scancel", "--me"], env=environment, capture_output=True)
        for process in reversed(running):
            process.terminate()
            process.wait()


@contextmanager
def ray_cluster(folder: Path) -> Iterator[Any]:
    """A cluster of a head without processors and two nodes with one each, by Ray's own means for tests: the
    address is its `address`, and a node of it can be removed without ceremony."""
    before = dict(os.environ)
    # A folder of its own for everything, its address included; workers that do not stand back behind all else
    # that the machine does; and a node that answers late on a busy machine is not dead.
    os.environ |= {"RAY_TMPDIR": str(folder), "RAY_worker_niceness": "0"}
    os.environ |= {"RAY_health_check_timeout_ms": "120000"}
    (folder / "ray").mkdir(parents=True)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        ray.shutdown()  # this process, if it has spoken to the cluster
        cluster.shutdown()
        os.environ.clear()
        os.environ |= before


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in opened]
