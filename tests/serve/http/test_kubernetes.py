"""docs/kubernetes.md agrees with the server: flags, paths, ports, labels and metrics of its manifests."""

import re
from pathlib import Path

import yaml

from tests.serve.client import ask, endpoints, make_service, serve_flags

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
TEXT = PAGE.read_text("utf-8")
DOCUMENTS = [
    document for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) for document in yaml.safe_load_all(block)
]
BY_KIND = {document["kind"]: document for document in DOCUMENTS if "kind" in document}
(VALUES,) = [document for document in DOCUMENTS if "kind" not in document]

POD = BY_KIND["Deployment"]["spec"]["template"]


def container(pod):
    (found,) = pod["spec"]["containers"]
    return found


def arguments(pod):
    """Return flag -> value of a container's command line, with the command's defaults, and the model as MODEL."""
    command, verb, model, *line = [*container(pod)["command"], *container(pod)["args"]]
    assert (command, verb) == ("jlora", "serve")
    found = {"MODEL": model, **serve_flags()}
    for part in line:
        flag, _, value = part.partition("=")
        assert flag in found  # the flag exists, and is not abbreviated
        found[flag] = value
    return found


def port(pod):
    return next(one["containerPort"] for one in container(pod)["ports"] if one["name"] == "http")


def test_command_line_of_the_container():
    args = arguments(POD)
    assert args["--host"] == "0.0.0.0"  # probes come from outside the container
    mounts = {mount["mountPath"] for mount in container(POD)["volumeMounts"]}
    volumes = {volume["name"] for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in container(POD)["volumeMounts"]} == volumes
    paths = [args[name] for name in ("MODEL", "--lora-root", "--compilation-cache-dir") if args[name] != "none"]
    assert all(any(path == mount or path.startswith(f"{mount}/") for mount in mounts) for path in paths)
    assert POD["spec"]["terminationGracePeriodSeconds"] > (
        container(POD).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        + float(args["--drain-timeout"])
        + 5  # for finished responses to reach their clients
    )


def test_image_and_pod_do_without_root():
    (recipe,) = re.findall(r"```dockerfile\n(.*?)```", TEXT, re.DOTALL)
    assert re.search(r"^USER [1-9]\d*$", recipe, re.MULTILINE)  # the kubelet checks numbers only
    assert POD["spec"]["securityContext"] == {"runAsNonRoot": True}


def test_probes_use_existing_paths():
    paths = {path for _, path in endpoints(make_service())}
    args, found = arguments(POD), container(POD)
    assert port(POD) == int(args["--port"]) == 8000  # the port that AIBrix and production-stack call
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[name]["httpGet"]["path"] in paths
        assert found[name]["httpGet"]["port"] == "http"
    live = found["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > float(args["--drain-timeout"])


def test_selectors_match_the_pods():
    labels = POD["metadata"]["labels"]
    kinds = ("Deployment", "PodMonitor", "InferencePool")
    selectors = [BY_KIND[kind]["spec"]["selector"]["matchLabels"] for kind in kinds]
    selectors += [BY_KIND["Service"]["spec"]["selector"], VALUES["router"]["modelServers"]["matchLabels"]]
    selectors += [BY_KIND["ModelAdapter"]["spec"]["podSelector"]["matchLabels"]]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    assert BY_KIND["LoraAdapter"]["spec"]["baseModel"] == labels["model"]
    assert labels["adapter.model.aibrix.ai/enabled"] == "true"
    ports = [BY_KIND["InferencePool"]["spec"]["targetPorts"], VALUES["router"]["modelServers"]["targetPorts"]]
    assert ports == [[{"number": port(POD)}]] * 2
    (monitored,) = BY_KIND["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (monitored["port"], monitored["path"]) == ("http", "/metrics")
    assert labels["model.aibrix.ai/port"] == labels["model.aibrix.ai/metric-port"] == str(port(POD))


def test_documented_metrics_and_endpoints_exist():
    text = ask(make_service(), "GET", "/metrics").text
    metrics = set(re.findall(r"`((?:vllm|jlora):\w+)`", TEXT))
    assert "vllm:kv_cache_usage_perc" in metrics
    assert metrics <= set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    paths = set(re.findall(r"`(GET|POST) (/\S+?)[ `]", TEXT))
    assert len(paths) == 3
    assert paths <= endpoints(make_service())
