"""The Kubernetes manifests: valid by the API's own schemas, complete, and in step with what the code asks for."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.controller.scalers.kubernetes import KubernetesScaler
from services.controller.verbs import KEPT, ROLES

K8S = Path(__file__).parents[3] / "deploy/k8s"
VERSION = "1.31"
BASE = yaml.safe_load((K8S / "base/kustomization.yaml").read_text())
DOCUMENTS: dict[str, dict[str, Any]] = {
    f"{document['kind']}/{document['metadata']['name']}": document
    for name in BASE["resources"]
    for document in yaml.safe_load_all((K8S / "base" / name).read_text())
}
ROLE_POD = {role: DOCUMENTS[f"Deployment/sextet-{role}"]["spec"]["template"]["spec"] for role in ROLES}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_valid(name: str) -> None:
    kubernetes_validate.validate(DOCUMENTS[name], VERSION, strict=True)


def test_the_check_finds_what_is_wrong() -> None:
    wrong = yaml.safe_load((K8S / "base/rollout.yaml").read_text())
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_every_file_of_the_base_is_used() -> None:
    assert {path.name for path in (K8S / "base").glob("*.yaml")} == {*BASE["resources"], "kustomization.yaml"}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_has_probes_the_secret_and_its_own_address(role: str) -> None:
    [container] = ROLE_POD[role]["containers"]
    assert container["readinessProbe"]["grpc"]["port"] == 50051
    assert {"startupProbe", "livenessProbe"} <= container.keys()
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["SEXTET_ADVERTISE"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment["SEXTET_TOKEN_FILE"]["value"].startswith(mounts["token"])
    assert not ROLE_POD[role]["automountServiceAccountToken"]
    assert ROLE_POD[role]["securityContext"]["runAsNonRoot"]
    # Who writes checkpoints sees the runs; who learns is never there twice.
    assert ("runs" in mounts) == (role in KEPT)
    strategy = DOCUMENTS[f"Deployment/sextet-{role}"]["spec"].get("strategy", {}).get("type")
    assert (strategy == "Recreate") == (role in KEPT)


def test_the_controller_may_scale_every_role_and_nothing_more(tmp_path: Path) -> None:
    [rule] = DOCUMENTS["Role/sextet-scaler"]["rules"]
    assert (rule["apiGroups"], rule["resources"], rule["verbs"]) == (["apps"], ["deployments/scale"], ["get", "update"])
    prefix = KubernetesScaler("http://x", tmp_path, "sextet")._prefix
    assert set(rule["resourceNames"]) == {f"{prefix}{role}" for role in ROLES}
    account = DOCUMENTS["Deployment/sextet-controller"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert [subject["name"] for subject in DOCUMENTS["RoleBinding/sextet-scaler"]["subjects"]] == [account]


def test_the_overlay_names_what_the_base_has() -> None:
    overlay = K8S / "overlays/rollouts"
    kustomization = yaml.safe_load((overlay / "kustomization.yaml").read_text())
    assert [(overlay / path).resolve() for path in kustomization["resources"]] == [(K8S / "base").resolve()]
    for entry in kustomization["replicas"]:
        assert f"Deployment/{entry['name']}" in DOCUMENTS
    for patch in kustomization["patches"]:
        content = yaml.safe_load((overlay / patch["path"]).read_text())
        base = DOCUMENTS[f"{content['kind']}/{content['metadata']['name']}"]
        # A strategic merge patch joins containers by name: another name would be a second container.
        names = [each["name"] for each in content["spec"]["template"]["spec"]["containers"]]
        assert names == [each["name"] for each in base["spec"]["template"]["spec"]["containers"]]
