"""docs/kubernetes.md agrees with the server: flags, paths, ports, labels and metrics of its manifests."""

import re
from pathlib import Path

import pytest
import yaml

from tests.serve.client import ask, endpoints, make_service, serve_flags
from tests.serve.exposition import parse
from tests.serve.fake_engine import FakeEngine

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


def test_manifests_have_kind_name_and_version():
    kinds = {"Deployment", "Service", "PodMonitor", "InferencePool", "HTTPRoute", "ModelAdapter", "LoraAdapter"}
    assert BY_KIND.keys() == kinds
    for document in BY_KIND.values():
        assert document["metadata"]["name"]
        assert re.fullmatch(r"([\w.-]+/)?v1(alpha1)?", document["apiVersion"])


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


def test_probes_use_existing_paths():
    paths = {path for _, path in endpoints(make_service())}
    args, found = arguments(POD), container(POD)
    assert port(POD) == int(args["--port"]) == 8000  # the port that AIBrix and production-stack call
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[name]["httpGet"]["path"] in paths
        assert found[name]["httpGet"]["port"] == "http"
    live = found["livenessProbe"]
    assert live["periodSeconds"] * live["failureThreshold"] > float(args["--drain-timeout"])


@pytest.mark.parametrize(("state", "ready", "status"), [
    ("warming", True, 503), ("serving", True, 200), ("closing", True, 503), ("serving", False, 503),
])  # fmt: skip
def test_readiness_probe_gets_the_state_of_the_server(state, ready, status):
    engine = FakeEngine()
    engine.ready = ready
    path = container(POD)["readinessProbe"]["httpGet"]["path"]
    assert ask(make_service(engine, state=state), "GET", path).status == status


def test_selectors_match_the_pods():
    labels = POD["metadata"]["labels"]
    selectors = [
        BY_KIND["Deployment"]["spec"]["selector"]["matchLabels"],
        BY_KIND["Service"]["spec"]["selector"],
        BY_KIND["PodMonitor"]["spec"]["selector"]["matchLabels"],
        BY_KIND["InferencePool"]["spec"]["selector"]["matchLabels"],
        VALUES["router"]["modelServers"]["matchLabels"],
        BY_KIND["ModelAdapter"]["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector
        assert selector.items() <= labels.items()
    assert BY_KIND["LoraAdapter"]["spec"]["baseModel"] == labels["model"]
    assert labels["adapter.model.aibrix.ai/enabled"] == "true"
    ports = [BY_KIND["InferencePool"]["spec"]["targetPorts"], VALUES["router"]["modelServers"]["targetPorts"]]
    assert ports == [[{"number": port(POD)}]] * 2
    (monitored,) = BY_KIND["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert (monitored["port"], monitored["path"]) == ("http", "/metrics")
    assert labels["model.aibrix.ai/port"] == labels["model.aibrix.ai/metric-port"] == str(port(POD))


def test_adapters_are_below_the_lora_root():
    root = arguments(POD)["--lora-root"]
    for path in (
        BY_KIND["ModelAdapter"]["spec"]["artifactURL"],
        BY_KIND["LoraAdapter"]["spec"]["adapterSource"]["adapterPath"],
    ):
        assert path.startswith(f"{root}/")
    (secret,) = [one["valueFrom"]["secretKeyRef"] for one in container(POD)["env"]]
    key = BY_KIND["LoraAdapter"]["spec"]["vllmApiKey"]
    assert (key["secretName"], key["secretKey"]) == (secret["name"], secret["key"])


def test_picker_profile_uses_every_declared_plugin():
    config = yaml.safe_load(
        VALUES["router"]["epp"]["pluginsCustomConfig"][VALUES["router"]["epp"]["pluginsConfigFile"]]
    )
    declared = {plugin["type"] for plugin in config["plugins"]}
    (profile,) = config["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} == declared - {"single-profile-handler"}


def test_documented_metrics_exist():
    families = parse(ask(make_service(), "GET", "/metrics").text)
    named = set(re.findall(r"`((?:vllm|jlora):\w+)`", TEXT))
    assert "vllm:kv_cache_usage_perc" in named
    assert named <= families.keys()
    labels = families["vllm:lora_requests_info"].samples[0][1]
    assert labels.keys() == {"running_lora_adapters", "waiting_lora_adapters", "max_lora"}


def test_documented_endpoints_exist():
    named = set(re.findall(r"`(GET|POST) (/\S+?)[ `]", TEXT))
    assert len(named) == 3
    assert named <= endpoints(make_service())
