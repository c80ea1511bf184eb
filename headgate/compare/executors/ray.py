"""Runs on a Ray cluster: one actor each, which outlives the study's process and is found again by its name.

A run of several nodes has a placement group, so that it starts when all its nodes are free and not before.
The actor on the first node holds the lease and starts one on each of the others, which end with it.
"""

import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headgate import files
from headgate.compare.executors.worker import Nodes, Task, say_how_to_return, work
from headgate.errors import HeadgateError

NAMESPACE = "headgate"
PASSED_ON = ("PYTHONPATH", "HEADGATE_MECHANISM_FILES", "HEADGATE_NATIVE")
DEATH = 30.0
"""Seconds within which a failed run learns that another of its nodes has died, so that nothing is wrong with
the run itself."""


class RayExecutor:
    def __init__(self, study: Path, address: str, settings: Mapping[str, str], nodes: int = 1) -> None:
        self.study, self.nodes = study.resolve(), nodes
        self.settings = {_RESOURCES.get(name, name): float(amount) for name, amount in settings.items()}
        self._warned = False
        self._ray = connect(address)

    def start(self, tasks: Sequence[Task]) -> None:
        address = self._ray.get_runtime_context().gcs_address
        files.write_sealed(address_path(self.study), {"address": address})
        environment = {name: value for name, value in os.environ.items() if name in PASSED_ON}
        for task in tasks:
            name, nodes = _prefix(self.study) + task.key, 1 if task.exclusive else self.nodes
            resources = self._resources(task)
            self._warn_of_waiting(resources, nodes)
            options = _as_options(resources) | {"runtime_env": {"env_vars": environment}}
            if nodes > 1:
                _remove_group(self._ray, name)  # of a run that has been lost
                group = self._ray.util.placement_group(
                    [resources] * nodes, strategy="STRICT_SPREAD", name=name, lifetime="detached"
                )
                options |= _place(group, 0)
            actor = self._ray.remote(RayWork).options(
                **options, name=name, namespace=NAMESPACE, lifetime="detached"
            )
            actor.remote(str(self.study), task.key, nodes, options)

    def _resources(self, task: Task) -> dict[str, float]:
        """Of each node of a run, as Ray's nodes call them."""
        own = {"CPU": float(task.threads * task.processes)} | self.settings
        if task.exclusive:  # all of a machine's processors, so that nothing else is put beside it
            own["CPU"] = max(node.get("CPU", 1.0) for node in self._nodes())
        return own

    def _nodes(self) -> list[dict[str, float]]:
        """What each living node has in all."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _warn_of_waiting(self, resources: Mapping[str, float], nodes: int) -> None:
        """A cluster that grows may get such nodes; any other would let the runs wait without a word."""
        fitting = [
            node
            for node in self._nodes()
            if all(node.get(what, 0) >= amount for what, amount in resources.items())
        ]
        if len(fitting) < nodes and not self._warned:
            self._warned = True
            asked = ", ".join(f"{amount:g} {what}" for what, amount in resources.items())
            print(
                f"headgate: the runs wait for {nodes} Ray node{'s' * (nodes > 1)} with {asked}, and there "
                f"{'is' if len(fitting) == 1 else 'are'} {len(fitting)}; --ray asks for less",
                file=sys.stderr,
            )

    def active(self) -> set[str]:
        return {name.removeprefix(_prefix(self.study)) for name in _actors(self._ray, self.study)}

    def wait(self) -> None:
        time.sleep(1.0)

    def stop(self) -> None:
        say_how_to_return(self.active(), self.study)

    def cancel(self) -> None:
        _cancel(self._ray, self.study)


_RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU"}
"""What nodes and placement groups call the resources of an actor that have a name of their own there."""


def _as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """For an actor."""
    named = {option: resources[what] for option, what in _RESOURCES.items() if what in resources}
    others = {what: amount for what, amount in resources.items() if what not in _RESOURCES.values()}
    memory = {"memory": others.pop("memory")} if "memory" in others else {}
    return {**named, **memory, "resources": others}


class RayWork:
    """Works from a thread, so that Ray sees a living actor, and leaves when it is done."""

    def __init__(self, study: str, key: str, nodes: int, options: dict[str, Any]) -> None:
        threading.Thread(target=self._work, args=(Path(study), key, nodes, options), daemon=True).start()

    def _work(self, study: Path, key: str, nodes: int, options: dict[str, Any]) -> None:
        import ray

        context = ray.get_runtime_context()
        job = context.get_actor_id() or ""
        try:
            if nodes == 1:
                work(study, key, engine="ray", job=job)
            else:
                _work_with_others(ray, study, key, nodes, options, job)
        finally:
            ray.kill(context.current_actor)


class RayPart:
    """The part of a run on a node that is not its first."""

    def work(self, study: str, key: str, nodes: Nodes) -> int:
        return work(Path(study), key, engine="ray", nodes=nodes)


def _work_with_others(ray: Any, study: Path, key: str, count: int, options: dict[str, Any], job: str) -> None:
    name = _prefix(study) + key
    group = ray.util.get_placement_group(name)
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    # Nodes of one machine need no network to meet, nor a name server, which PyTorch would ask.
    address = "127.0.0.1" if len(machines) == 1 else ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    parts = []
    for rank in range(1, count):
        actor = ray.remote(RayPart).options(**options | _place(group, rank)).remote()
        parts.append(actor.work.remote(str(study), key, Nodes(count, rank, address, port)))

    def end_with_the_others() -> None:
        """A node that dies takes the run along; its lease stays as it is, so the run counts as lost."""
        try:
            ray.get(parts)
        except ray.exceptions.RayError:
            os._exit(1)

    watching = threading.Thread(target=end_with_the_others, daemon=True)
    watching.start()
    nodes = Nodes(count, 0, address, port)
    work(study, key, engine="ray", job=job, nodes=nodes, failing=lambda: watching.join(DEATH))
    ray.util.remove_placement_group(group)


def _place(group: Any, index: int) -> dict[str, Any]:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)}


def connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise HeadgateError("--on ray needs Ray; install it with: pip install 'headgate[cluster]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise HeadgateError(
                f"no Ray cluster answers at --ray-address {address}: {str(error).splitlines()[0]}; start one "
                "with ray start --head, or give its address"
            ) from error
    return ray


def address_path(study: Path) -> Path:
    """The address of the cluster that was given the study's runs."""
    return study / "queue" / "ray.json"


def cancel_ray_actors(study: Path, address: str) -> None:
    """End the study's actors, whose runs save first."""
    if address == "auto":
        address = files.read_sealed(address_path(study), always=True)["address"]
    _cancel(connect(address), study.resolve())


def _cancel(ray: Any, study: Path) -> None:
    for name in _actors(ray, study):
        with suppress(ValueError):  # it has ended by itself
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        _remove_group(ray, name)


def _remove_group(ray: Any, name: str) -> None:
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:  # there is none
        return
    ray.util.remove_placement_group(group)


def _actors(ray: Any, study: Path) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    mine = (entry["name"] for entry in named if entry["namespace"] == NAMESPACE)
    return [name for name in mine if name.startswith(_prefix(study))]


def _prefix(study: Path) -> str:
    return hashlib.sha256(str(study).encode()).hexdigest()[:12] + "/"
