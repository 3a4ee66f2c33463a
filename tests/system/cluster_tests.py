# SPDX-License-Identifier: Apache-2.0
"""tools/cluster: images fetched onto the nodes of a cluster. Slurm is Debian's, with one node, its own
configuration and its own processes."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

from harness import Skip, check, check_equal, need_root, noise, program, small_image, test, wait_until

MIB = 1 << 20
CLUSTER = pathlib.Path(__file__).resolve().parents[2] / "tools" / "cluster"

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs={processors} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def stop(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not pathlib.Path(f"/proc/{pid}").exists(), f"process {pid} ends")


@contextlib.contextmanager
def daemon(log, *command, environment):
    with open(log, "wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output,
                                   stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def slurm(workspace):
    """A cluster of this machine alone. Gives the environment in which its commands work."""
    for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun"):
        check(shutil.which(name), f"{name} is missing")
    root = workspace.path("slurm")
    for directory in (root, root / "state", root / "spool"):
        directory.mkdir()
    key = root / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = root / "slurm.conf"
    conf.write_text(SLURM_CONF.format(host=socket.gethostname().split(".")[0], root=root,
                                      controller_port=free_port(), node_port=free_port(),
                                      processors=os.cpu_count()))
    environment = dict(os.environ, SLURM_CONF=str(conf), LAMINA=program("LAMINA"),
                       LAMINA_STATE=str(workspace.state))
    # It goes to the background by itself, once its socket is there.
    subprocess.run(["munged", "--force", f"--key-file={key}", f"--socket={root}/munge.socket",
                    f"--pid-file={root}/munged.pid", f"--seed-file={root}/seed",
                    f"--log-file={root}/munged.log", "--num-threads=2"], check=True)
    try:
        with daemon(root / "slurmctld.log", "slurmctld", "-D", "-f", conf,
                    environment=environment), \
             daemon(root / "slurmd.log", "slurmd", "-D", "-f", conf, environment=environment):
            wait_until(lambda: subprocess.run(
                ["sinfo", "--noheader", "--format=%T"], env=environment, check=False,
                capture_output=True, text=True).stdout.strip() == "idle", "the node is there")
            yield environment
    finally:
        stop(int((root / "munged.pid").read_text()))


def submit(workspace, environment, *arguments):
    """Runs the batch script to its end; gives exit code and output."""
    output = workspace.path("job.out")
    result = subprocess.run(["sbatch", "--wait", f"--output={output}",
                             CLUSTER / "prefetch.sbatch", *arguments],
                            env=environment, cwd=workspace.root, check=False, capture_output=True,
                            text=True, timeout=300)
    return result.returncode, output.read_text() if output.exists() else result.stderr


@test("cluster.daemonset-installs-what-only-root-can-have-put-there")
def _(_):
    try:
        import yaml  # pylint: disable=import-outside-toplevel
    except ImportError as error:
        raise Skip("python3-yaml is not installed") from error
    text = (CLUSTER / "laminad-daemonset.yaml").read_text(encoding="utf-8")
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    install = pod["initContainers"][0]
    script = install["command"][2]
    subprocess.run(["sh", "-n", "-c", script], check=True)
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in pod["volumes"]}
    check_equal([mount["name"] for mount in install["volumeMounts"]], list(paths), "volumes")
    for path in paths.values():
        check(path.startswith(("/run/", "/var/lib/")), f"others than root may make {path}")
        check(f"{path}/lamina.deb" in script, f"what is in {path} is not installed")
    # Nobody is there to answer dpkg's questions.
    for option in ("--yes", "--allow-downgrades", "-o Dpkg::Options::=--force-confdef",
                   "-o Dpkg::Options::=--force-confold"):
        check(option in script, f"apt-get gets no {option}")


@test("cluster.slurm-job-fetches-images-onto-its-nodes")
def _(workspace):
    need_root("Slurm's daemons run as root here")
    image = workspace.converted(small_image({"a": noise(5 * MIB)}))
    with slurm(workspace) as environment:
        code, output = submit(workspace, environment, image)
        check_equal(code, 0, f"exit code of a job that said {output!r}")
        check(re.search(r"^0: .*converted.* in [12] requests", output, re.M), output)
        with workspace.mounted(image) as directory:
            check_equal((directory / "a").read_bytes(), noise(5 * MIB), "content")
            check_equal(workspace.stats(directory)[0]["origin_requests"], 0, "requests of readers")


@test("cluster.slurm-job-fails-if-an-image-cannot-be-fetched")
def _(workspace):
    need_root("Slurm's daemons run as root here")
    image = workspace.converted(small_image({"a": noise(MIB)}))
    images = workspace.path("images.txt")
    images.write_text(f"oci:{workspace.path('nowhere')}:x\n{image}\n")
    with slurm(workspace) as environment:
        code, output = submit(workspace, environment, f"--from-file={images}")
        check_equal(code, 1, f"exit code of a job that said {output!r}")
        check("nowhere" in output and "1.0 MiB" in output, output)
        code, output = submit(workspace, environment)
        check_equal(code, 2, f"exit code without an image, with {output!r}")
