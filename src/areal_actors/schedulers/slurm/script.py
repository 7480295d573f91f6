"""Render what is passed to sbatch: its arguments, and the script that runs on the node. Pure.

The script is deliberately short. It starts one worker as a step, or all processes of a gang as one step, forwards the
warning before the time limit, records how the worker ended, and asks Slurm to run the job again if the worker requests
it by its exit status (``schedulers.base``). It works with bash 4.4.

Neither contains secrets: the worker reads them from a file that only its owner can read, named by ``AREAL_BOOTSTRAP``.
"""

from __future__ import annotations

import shlex
import sys
from math import ceil
from pathlib import Path
from string import Template

from attrs import field, frozen
from attrs.validators import matches_re

from areal_actors.schedulers.base import RUN_AGAIN, WORKER_NAME, Resources
from areal_actors.schedulers.slurm.settings import ContainerType, GpuOption, SlurmConfig

_GANG_WAIT_SECONDS = 30
"""Seconds after the end of a gang's first process at which the remaining processes are killed."""

_SCRIPT = Template("""\
#!/bin/bash
# One worker of areal_actors: $name
umask 077
name=$quoted_name
directory=$quoted_directory
restarts=$${SLURM_RESTART_COUNT:-0}
step=
is_ending=0
is_warned=0

finish() {  # how it ended: status, time, node
  local record="$$name.$$SLURM_JOB_ID-$$restarts"
  printf '%s %s %s\\n' "$$1" "$$(date +%s)" "$${SLURMD_NODENAME:-}" >"$$directory/exit/.$$record" &&
    mv "$$directory/exit/.$$record" "$$directory/exit/$$record"
}
trap 'is_ending=1' TERM
trap 'is_warned=1; [ -z "$$step" ] || kill -USR1 "$$step"' USR1

if [ -e "$$directory/stop/$$name" ]; then
  echo "This job was taken back before it began."
  finish 0
  exit 0
fi
${setup}export AREAL_BOOTSTRAP="$$directory/bootstrap/$$name.json"
export SRUN_CPUS_PER_TASK=$cpus
${threads}srun $step &
step=$$!
[ "$$is_warned" = 0 ] || kill -USR1 "$$step"
while :; do
  wait "$$step"
  status=$$?
  # A trap ends the wait before the step ends.
  [ "$$status" -gt 128 ] && kill -0 "$$step" 2>/dev/null || break
done

finish "$$status"
if [ "$$status" = $run_again ] && [ "$$is_ending" = 0 ] && [ "$$restarts" -lt $max_requeues ] &&
  [ ! -e "$$directory/stop/$$name" ]; then
  scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
""")


@frozen(kw_only=True)
class JobRequest:
    """One worker as a job. ``run`` is unique, so that the job's name is, too. ``log`` receives the job's output."""

    run: str = field(validator=matches_re(r"[0-9a-f]{16}"))
    worker: str = field(validator=matches_re(WORKER_NAME))
    life: int
    directory: Path
    """The files for the jobs of a run (``files``), shared with the nodes."""
    log: Path
    working_directory: Path
    resources: Resources = field(factory=Resources)
    """Resources of each process."""
    num_tasks: int = 1
    avoided: tuple[str, ...] = ()
    """Nodes that do not answer, as far as the controller knows; the cluster may take minutes to notice."""
    python: Path | None = None
    """``None``: this interpreter, or ``python3`` in a container."""
    module: str = "areal_actors.worker"
    """The module that runs after the preflight has succeeded."""

    @property
    def name(self) -> str:
        """Return the job's name, which no other job of the cluster has, had or will have."""
        return f"aa-{self.run}-{self.worker}.{self.life}"

    @property
    def is_gang(self) -> bool:
        """Return whether the job consists of several processes that start and end together."""
        return self.num_tasks > 1

    def shape(self, config: SlurmConfig) -> tuple[int, int]:
        """Return the number of nodes, and of processes on each; the last node may have fewer."""
        per_node = min(config.ranks_per_node or self.num_tasks, self.num_tasks)
        return ceil(self.num_tasks / per_node), per_node


def create_arguments(request: JobRequest, config: SlurmConfig) -> tuple[str, ...]:
    """Return the arguments of sbatch; the script goes to its standard input."""
    num_nodes, per_node = request.shape(config)
    node = request.resources.times(per_node)
    gpus = node.gpus
    can_requeue = config.max_requeues > 0
    site = {
        "partition": config.partition,
        "account": config.account,
        "exclude": ",".join([*([config.exclude] if config.exclude else []), *request.avoided]) or None,
    }
    return (
        "--parsable",
        f"--job-name={request.name}",
        f"--comment=areal_actors run={request.run} worker={request.worker} life={request.life}",
        f"--nodes={num_nodes}",
        *([f"--ntasks={request.num_tasks}"] if request.is_gang else []),
        f"--ntasks-per-node={per_node}",
        f"--cpus-per-task={request.resources.cpus}",
        *([f"--mem={node.memory_mib}M"] if node.memory_mib else []),
        *([f"--gpus-per-node={gpus}"] if gpus and config.gpu_option is GpuOption.GPUS_PER_NODE else []),
        *([f"--gres=gpu:{gpus}"] if gpus and config.gpu_option is GpuOption.GRES else []),
        f"--time={config.time_minutes}",
        f"--signal=B:USR1@{config.margin_seconds}",
        "--requeue" if can_requeue else "--no-requeue",
        # A job that is requeued must not overwrite its log.
        "--open-mode=append",
        # Slurm expands % sequences in the names of output files.
        f"--output={str(request.log).replace('%', '%%')}",
        f"--chdir={request.working_directory}",
        "--export=ALL",
        *(f"--{option}={value}" for option, value in site.items() if value is not None),
        *config.extra_arguments,
    )


def render_script(request: JobRequest, config: SlurmConfig) -> str:
    """Return the script that runs on the node."""
    cpus = request.resources.cpus
    return _SCRIPT.substitute(
        name=request.name,
        quoted_name=shlex.quote(request.name),
        quoted_directory=shlex.quote(str(request.directory)),
        setup="".join(f"{line}\n" for line in ("", *config.setup)),
        cpus=cpus,
        # Processes that share a node would each start one thread per core otherwise.
        threads=f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{cpus}}}"\n' if request.is_gang else "",
        step=" \\\n  ".join(_step(request, config)),
        run_again=RUN_AGAIN,
        max_requeues=config.max_requeues,
    )


def _step(request: JobRequest, config: SlurmConfig) -> list[str]:
    """Return the quoted options of srun, and the command."""
    num_nodes, per_node = request.shape(config)
    gang = [f"--ntasks-per-node={per_node} --distribution=block", f"--wait={_GANG_WAIT_SECONDS} --label"]
    options = [
        "--export=ALL",
        f"--nodes={num_nodes} --ntasks={request.num_tasks}",
        *(gang if request.is_gang else []),
        f"--cpus-per-task={request.resources.cpus}",
        # --mpi=none: the plugin that a site sets as default may not be installed.
        # --kill-on-bad-exit=0: the processes of a gang find out which of them failed, and log it before they exit.
        "--mpi=none --kill-on-bad-exit=0 --unbuffered",
    ]
    python = request.python or Path("python3" if config.container else sys.executable)
    command = [str(python), "-m", "areal_actors.schedulers.preflight", str(config.preflight_seconds), request.module]
    needed = sorted({request.directory.parent, request.working_directory})
    if config.container is not None and config.container.type is ContainerType.PYXIS:
        mounts = [*(f"{path}:{path}" for path in needed), *config.container.mounts]
        options += _quoted(
            [
                f"--container-image={config.container.image}",
                f"--container-mounts={','.join(mounts)}",
                f"--container-workdir={request.working_directory}",
                "--no-container-mount-home",
                "--container-env=AREAL_BOOTSTRAP",
            ]
        )
    elif config.container is not None:
        binds = [word for mount in (*map(str, needed), *config.container.mounts) for word in ("--bind", mount)]
        graphics = ["--nv"] if request.resources.gpus else []
        where = ["--pwd", str(request.working_directory)]
        command = ["apptainer", "exec", *graphics, *binds, *where, config.container.image, *command]
    return [*options, " ".join(_quoted(command))]


def _quoted(words: list[str]) -> list[str]:
    return [shlex.quote(word) for word in words]
