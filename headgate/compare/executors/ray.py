"""Runs on a Ray cluster: one actor each, which outlives the study's process and is found again by its
name."""

import hashlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.compare.executors.worker import Task, say_how_to_return, work
from headgate.errors import HeadgateError

NAMESPACE = "headgate"


class RayExecutor:
    interval = 1.0

    def __init__(self, study: Path, address: str, settings: Mapping[str, str]) -> None:
        self.study, self.settings = study.resolve(), {name: float(n) for name, n in settings.items()}
        self._ray = connect(address)

    def start(self, tasks: Sequence[Task]) -> None:
        environment = {name: value for name, value in os.environ.items() if name in PASSED_ON}
        for task in tasks:
            processors: float = task.threads * task.processes
            if task.exclusive:  # all of a machine's processors, so that nothing else is put beside it
                processors = max(
                    node["Resources"].get("CPU", 1) for node in self._ray.nodes() if node["Alive"]
                )
            options = {"num_cpus": processors} | self.settings
            actor = self._ray.remote(RayWork).options(
                **options,
                name=_prefix(self.study) + task.key,
                namespace=NAMESPACE,
                lifetime="detached",
                runtime_env={"env_vars": environment},
            )
            actor.remote(str(self.study), task.key)

    def active(self) -> set[str]:
        return {name.removeprefix(_prefix(self.study)) for name in _actors(self._ray, self.study)}

    def stop(self) -> None:
        say_how_to_return(self.active(), self.study)


PASSED_ON = ("PYTHONPATH", "HEADGATE_MECHANISM_FILES", "HEADGATE_NATIVE")


class RayWork:
    """Works from a thread, so that Ray sees a living actor, and leaves when it is done."""

    def __init__(self, study: str, key: str) -> None:
        threading.Thread(target=self._work, args=(Path(study), key), daemon=True).start()

    def _work(self, study: Path, key: str) -> None:
        import ray

        context = ray.get_runtime_context()
        try:
            work(study, key, engine="ray", job=context.get_actor_id() or "")
        finally:
            ray.kill(context.current_actor)


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


def cancel_ray_actors(study: Path, address: str) -> list[str]:
    """End the study's actors, whose runs save first; returns their names."""
    ray = connect(address)
    names = _actors(ray, study.resolve())
    for name in names:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    return names


def _actors(ray: Any, study: Path) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    mine = (entry["name"] for entry in named if entry["namespace"] == NAMESPACE)
    return [name for name in mine if name.startswith(_prefix(study))]


def _prefix(study: Path) -> str:
    return hashlib.sha256(str(study).encode()).hexdigest()[:12] + "/"
