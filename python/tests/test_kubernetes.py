"""deploy/kubernetes: is it what the API takes, and does what it starts fit backtape?

Goal: no field is misspelt, no reference dangles, and the commands and variables are those of this version.
Method: the API's own schemas, strictly; then the pods' commands and variables on this machine, without a
cluster. What it does not show: that a cluster runs it. JobSet's own fields have no schema here: the Job in it has.
"""

import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from processes import free_port
from ssh_hosts import wait_for
from test_deploy import RANK, REPLAY, ROOT, coordinator, required

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("pvc", "bucket", "jobset")
# The oldest version that is still supported somewhere, and the newest that is known.
VERSIONS = ("1.31", "1.37")


def documents():
    """Every object of the folder that is the API's, with the file that it is in."""
    for path in sorted(FOLDER.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if isinstance(document, dict) and document["kind"] != "Kustomization":
                yield path.relative_to(FOLDER), document


def rendered(overlay):
    if shutil.which("kubectl") is None:
        pytest.skip("NOT TESTED, overlays of deploy/kubernetes: kubectl is not installed")
    done = subprocess.run(["kubectl", "kustomize", FOLDER / overlay], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def known(document):
    """The part of an object that has a schema of the API."""
    if document["kind"] != "JobSet":
        return document
    [job] = document["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"], **job["template"]}


def pods(documents):
    for document in map(known, documents):
        if document["kind"] in ("Job", "StatefulSet"):
            yield document, document["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_the_api_takes(version):
    found = list(documents())
    assert {document["kind"] for _, document in found} == {
        "ConfigMap", "Service", "StatefulSet", "NetworkPolicy", "Job", "JobSet",
    }  # fmt: skip
    for _, document in found:
        kubernetes_validate.validate(known(document), version, strict=True)


def test_a_misspelt_field_would_be_seen():
    [pod] = [pod for document, pod in pods(d for _, d in documents()) if document["kind"] == "StatefulSet"]
    pod["containers"][0]["livenesProbe"] = pod["containers"][0].pop("livenessProbe")
    [whole] = [document for document, found in pods(d for _, d in documents()) if document["kind"] == "StatefulSet"]
    whole["spec"]["template"]["spec"] = pod
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(whole, VERSIONS[0], strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_whole(overlay):
    """Rendered, it is what the API takes, and whatever it refers to is in it."""
    objects = rendered(overlay)
    [settings] = [document["data"] for document in objects if document["kind"] == "ConfigMap"]
    services = {document["metadata"]["name"] for document in objects if document["kind"] == "Service"}
    services |= {document["spec"]["network"]["subdomain"] for document in objects if document["kind"] == "JobSet"}
    assert services == {"backtape-coordinator", "ranks"}
    for document in objects:
        kubernetes_validate.validate(known(document), VERSIONS[-1], strict=True)
    for document, pod in pods(objects):
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
        for container in pod["initContainers"] + pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert "memory" in container["resources"]["limits"]
            for variable in container.get("env", ()):
                key = variable.get("valueFrom", {}).get("configMapKeyRef")
                assert key is None or key["key"] in settings, variable
        assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
        if document["kind"] == "Job":
            assert document["spec"]["completions"] == document["spec"]["parallelism"] == int(settings["WORLD_SIZE"])
    store = {"pvc": "/dumps", "jobset": "/dumps", "bucket": "s3://dumps/team"}[overlay]
    assert settings["STORE"] == store


class Pod:
    """A pod's containers as processes of this machine, its paths below a folder of ours."""

    def __init__(self, pod, root, replaced):
        self.pod, self.root, self.replaced = pod, root, replaced

    def said(self, text):
        for old, new in (*self.replaced, ("/credentials", f"{self.root}/credentials"), ("/secret/", f"{self.root}/secret/")):
            text = text.replace(old, new)
        return text

    def mount_secret(self, folder):
        """As a kubelet does: files that the group may read, behind links."""
        (self.root / "secret" / "..data").mkdir(parents=True)
        (self.root / "credentials").mkdir()
        for path in folder.iterdir():
            there = self.root / "secret" / "..data" / path.name
            shutil.copyfile(path, there)
            there.chmod(0o440)
            (self.root / "secret" / path.name).symlink_to(Path("..data") / path.name)
        [container] = self.pod["initContainers"]
        subprocess.run([self.said(word) for word in container["command"]], check=True)

    def environment(self, settings, annotations):
        """What the kubelet would set, each variable seeing those before it."""
        found = {}
        for variable in self.pod["containers"][0]["env"]:
            source = variable.get("valueFrom", {})
            if "configMapKeyRef" in source:
                value = settings[source["configMapKeyRef"]["key"]]
            elif "fieldRef" in source:
                value = annotations[source["fieldRef"]["fieldPath"]]
            else:
                value = expanded(variable["value"], found)
            found[variable["name"]] = self.said(value)
        return found


def expanded(text, variables):
    for name, value in variables.items():
        text = text.replace(f"$({name})", value)
    assert "$(" not in text, text
    return text


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def test_the_commands_and_variables_of_the_pods_record_a_job(tmp_path):
    required(None if coordinator() else "no coordinator: cargo build --bin coordinator")
    by_kind = {document["kind"]: document for _, document in documents()}
    settings = by_kind["ConfigMap"]["data"] | {"STORE": str(tmp_path / "dumps"), "BACKTAPE_STEPS": "0-1"}
    grpc, metrics = free_port(), free_port()
    subprocess.run([coordinator(), "certs", "--out", tmp_path / "made", "--host", "127.0.0.1"], check=True)
    replaced = [
        ("0.0.0.0:7447", f"127.0.0.1:{grpc}"), ("0.0.0.0:9464", f"127.0.0.1:{metrics}"),
        ("backtape-coordinator:7447", f"127.0.0.1:{grpc}"),
    ]  # fmt: skip
    serving = Pod(by_kind["StatefulSet"]["spec"]["template"]["spec"], tmp_path / "C", replaced)
    serving.mount_secret(tmp_path / "made" / "coordinator")
    [container] = serving.pod["containers"]
    variables = serving.environment(settings, {})
    words = [serving.said(expanded(word, variables)) for word in container["args"]]
    processes = [subprocess.Popen([coordinator(), *words], env=variables)]
    try:
        health = f"http://127.0.0.1:{metrics}{container['readinessProbe']['httpGet']['path']}"
        wait_for(lambda: answers(health), 20, processes[0].poll)
        job = by_kind["Job"]
        for index in range(job["spec"]["completions"]):
            pod = Pod(job["spec"]["template"]["spec"], tmp_path / f"pod-{index}", replaced)
            pod.mount_secret(tmp_path / "made" / "rank")
            annotations = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
            environment = pod.environment(settings, annotations)
            command = [sys.executable, RANK, "record"]
            processes.append(subprocess.Popen(command, env=environment, cwd=pod.root))
        assert [process.wait(timeout=60) for process in processes[1:]] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for step in range(2):
        verify = [REPLAY, "verify", "--dump", tmp_path / "dumps" / settings["RUN"], "--step", str(step)]
        subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)
