"""Tokens, roles and limits of tokens; who may do what; requests that a browser was tricked into."""

import hashlib
import json
import ssl
import subprocess

import numpy as np
import pytest
from http_calls import IMAGES, infer, refused, web
from small_server import has_grpc, listening, token

from tribe.serve.client import Client, ClientError
from tribe.serve.errors import Forbidden, NoToken
from tribe.serve.plain import encode_npy
from tribe.serve.security import Access, Principal, Token, read_tokens
from tribe.serve.server import new_access

BODY = encode_npy(IMAGES)


TOKENS = [
    token("watcher", streams="a-", role="predict"),
    token("camera", streams="a-", role="learn", most_streams=2),
    token("slow", streams="s-", role="learn", images_per_second=1e-6),
    token("owner", streams="a-", role="admin"),
    token("operator", streams="", role="admin"),
    token("prometheus", streams="", role="predict"),
]


@pytest.fixture(scope="module")
def guarded():
    with listening(tokens=TOKENS, grpc_port=0 if has_grpc() else None) as found:
        yield found


def call(server, name, method, path, content=None, **headers):
    given = {} if name is None else {"authorization": f"Bearer {name}"}
    return web.request(method, server.url + path, content=content, headers={**given, **headers})


# -- who may do what -------------------------------------------------------------------------------------------------

ROWS = [  # method, path, body, and who may: * is everybody
    ("GET", "/v2", None, "*"),
    ("GET", "/v2/health/ready", None, "*"),
    ("GET", "/v2/models/small", None, "*"),
    ("POST", "/v1/predict", BODY, "watcher camera slow owner operator prometheus"),
    ("POST", "/v1/streams/a-1/predict", BODY, "watcher camera owner operator prometheus"),
    ("GET", "/v1/streams/a-1", None, "watcher camera owner operator prometheus"),
    ("GET", "/v1/streams", None, "watcher camera slow owner operator prometheus"),
    ("PUT", "/v1/streams/a-1", None, "camera owner operator"),
    ("POST", "/v1/streams/a-1/end", None, "camera owner operator"),
    ("POST", "/v1/streams/a-1/freeze", None, "owner operator"),
    ("POST", "/v1/streams/a-1/unfreeze", None, "owner operator"),
    ("POST", "/v1/streams/a-1/promote", None, "owner operator"),
    ("POST", "/v1/streams/a-1/demote", None, "owner operator"),
    ("POST", "/v1/promote", None, "owner operator"),
    ("POST", "/v1/demote", None, "owner operator"),
    ("POST", "/v1/streams/a-1/reset", None, "owner operator"),
    ("POST", "/v1/streams/a-1/snapshot", None, "owner operator"),
    ("POST", "/v1/streams/a-1/rollback", None, "owner operator"),
    ("GET", "/v1/streams/a-1/state", None, "owner operator"),
    ("GET", "/metrics", None, "operator prometheus"),
]


@pytest.mark.parametrize(("method", "path", "body", "who"), ROWS, ids=[f"{m} {p}" for m, p, _, _ in ROWS])
def test_who_may_do_what(guarded, method, path, body, who):
    assert call(guarded, "operator", "PUT", "/v1/streams/a-1").status_code == 200
    assert call(guarded, "operator", "POST", "/v1/streams/a-1/snapshot").status_code == 200
    for each in TOKENS:
        answer = call(guarded, each.name, method, path, body)
        if who == "*" or each.name in who.split():
            assert answer.status_code == 200, (each.name, answer.text)
        else:
            refused(answer, 403, f"the token {each.name!r}")
    for wrong in (None, "nobody"):
        answer = call(guarded, wrong, method, path, body)
        if who == "*":
            assert answer.status_code == 200
        else:
            refused(answer, 401, "Authorization: Bearer TOKEN")
            assert answer.headers["www-authenticate"] == "Bearer"


def test_deleting_and_replacing_need_an_admin(guarded):
    assert call(guarded, "operator", "PUT", "/v1/streams/a-1").status_code == 200
    state = call(guarded, "operator", "GET", "/v1/streams/a-1/state").content
    for name in ("watcher", "camera"):
        refused(call(guarded, name, "DELETE", "/v1/streams/a-1"), 403, "role admin")
        refused(call(guarded, name, "PUT", "/v1/streams/a-1/state", state), 403, "role admin")
    assert call(guarded, "owner", "PUT", "/v1/streams/a-1/state", state).status_code == 200
    refused(call(guarded, "owner", "DELETE", "/v1/streams/b-1"), 403, "'b-1'")
    assert call(guarded, "owner", "DELETE", "/v1/streams/a-1").status_code == 200


def test_a_token_sees_only_its_streams(guarded):
    for name in ("a-see", "b-see"):
        call(guarded, "operator", "PUT", f"/v1/streams/{name}")
    found = {each["name"] for each in call(guarded, "watcher", "GET", "/v1/streams").json()["streams"]}
    assert "a-see" in found
    assert all(name.startswith("a-") for name in found)
    everything = {each["name"] for each in call(guarded, "prometheus", "GET", "/v1/streams").json()["streams"]}
    assert {"a-see", "b-see"} <= everything
    for name in ("a-see", "b-see"):
        call(guarded, "operator", "DELETE", f"/v1/streams/{name}")


def test_a_predicting_token_never_learns_and_never_creates(guarded):
    refused(call(guarded, "watcher", "POST", "/v1/streams/a-none/predict", BODY), 404, "create")
    call(guarded, "operator", "PUT", "/v1/streams/a-pre")
    answer = call(guarded, "watcher", "POST", "/v1/streams/a-pre/predict", BODY).json()
    assert answer["adapted"] is False
    assert call(guarded, "watcher", "GET", "/v1/streams/a-pre").json()["images"] == 0
    start = infer(guarded, sequence_id="a-pre", sequence_start=True, headers={"authorization": "Bearer watcher"})
    refused(start, 403, "role learn")
    call(guarded, "operator", "DELETE", "/v1/streams/a-pre")


def test_a_token_has_a_number_of_streams(guarded):
    for stream in call(guarded, "operator", "GET", "/v1/streams").json()["streams"]:
        call(guarded, "operator", "DELETE", f"/v1/streams/{stream['name']}")
    for name in ("a-1", "a-2", "a-1"):
        assert call(guarded, "camera", "POST", f"/v1/streams/{name}/predict", BODY).status_code == 200
    refused(call(guarded, "camera", "POST", "/v1/streams/a-3/predict", BODY), 429, "DELETE")
    refused(call(guarded, "camera", "PUT", "/v1/streams/a-3"), 429)
    call(guarded, "owner", "DELETE", "/v1/streams/a-2")
    assert call(guarded, "camera", "PUT", "/v1/streams/a-3").status_code == 200


def test_beyond_its_rate_a_token_only_predicts(guarded):
    answers = [call(guarded, "slow", "POST", "/v1/streams/s-1/predict", BODY).json()["adapted"] for _ in range(3)]
    assert answers == [True, False, False]


def test_the_rate_is_kept_over_time():
    now = [0.0]
    principal = Principal(Token("x", "", images_per_second=10.0), clock=lambda: now[0])
    learned = 0
    for _ in range(1000):  # 100 seconds
        learned += 4 * principal.may_learn(4)
        now[0] += 0.1
    assert 1000 <= learned <= 1020
    now[0] += 1.0
    assert principal.may_learn(1000), "a large batch is not refused for ever"
    now[0] += 1.0
    assert not principal.may_learn(1), "and later ones wait for its debt"
    assert not Principal(Token("x", "", images_per_second=0.0)).may_learn(1)
    assert Principal(Token("x", "")).may_learn(10**9)


# -- browsers ----------------------------------------------------------------------------------------------------------


def test_a_page_of_another_site_is_refused(server):
    url = f"{server.url}/v1/streams/web/predict"
    refused(web.post(url, content=BODY, headers={"origin": "https://evil.example"}), 403, "evil.example")
    refused(web.post(url, content=BODY, headers={"origin": "null"}), 403)
    assert web.post(url, content=BODY, headers={"origin": server.url}).status_code == 200


def test_a_name_that_leads_here_from_elsewhere_is_refused(server, guarded):
    for path in ("/v2", "/v1/streams", "/"):
        refused(web.get(server.url + path, headers={"host": "evil.example"}), 403, "evil.example")
    assert web.get(f"{server.url}/v2", headers={"host": f"localhost:{server.port}"}).status_code == 200
    assert web.get(f"{guarded.url}/v2", headers={"host": "camera-server.example"}).status_code == 200


# -- files of tokens ---------------------------------------------------------------------------------------------------


def test_a_file_of_tokens(tmp_path):
    digest = hashlib.sha256(b"0123456789abcdef").hexdigest()
    entry = {"name": "cam", "streams": "a-", "role": "learn", "most_streams": 3, "images_per_second": 2.5}
    (tmp_path / "t").write_text(json.dumps({"tokens": [entry | {"token": "0123456789abcdef"}]}))
    assert read_tokens(tmp_path / "t") == [Token("cam", digest, "a-", "learn", 3, 2.5)]
    (tmp_path / "t").write_text(json.dumps({"tokens": [entry | {"sha256": digest}]}))
    (found,) = read_tokens(tmp_path / "t")
    access = Access([found])
    assert access.identify("Bearer 0123456789abcdef").token is found
    assert access.identify("bearer  0123456789abcdef ").token is found
    for wrong in (None, "", "Bearer", "Bearer 0123456789abcde", "Basic 0123456789abcdef", f"Bearer {digest}"):
        with pytest.raises(NoToken):
            access.identify(wrong)
    with pytest.raises(Forbidden):
        access.identify("Bearer 0123456789abcdef").check("predict", "b-1")


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        ([], "no tokens"),
        ([{"token": "short"}], "token"),
        ([{"token": "ä" * 16}], "token"),
        ([{"token": "x" * 16, "sha256": "0" * 64}], "either"),
        ([{}], "either"),
        ([{"sha256": "xyz"}], "sha256"),
        ([{"token": "x" * 16, "role": "root"}], "root"),
        ([{"token": "x" * 16, "streams": "../"}], "streams"),
        ([{"token": "x" * 16, "most_streams": -1}], "most_streams"),
        ([{"token": "x" * 16, "images_per_second": -1}], "images_per_second"),
        ([{"token": "x" * 16, "rate": 1}], "rate"),
        ([{"token": "x" * 16}, {"token": "x" * 16}], "twice"),
    ],
)
def test_a_wrong_file_of_tokens_is_refused(tmp_path, tokens, word):
    entries = [{"name": "cam", "streams": "", "role": "admin"} | each for each in tokens]
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": entries}))
    with pytest.raises(ValueError, match=r"tokens\.json") as caught:
        read_tokens(tmp_path / "tokens.json")
    assert word in str(caught.value)


# -- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """A certificate for this machine, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    key, certificate = folder / "key.pem", folder / "cert.pem"
    try:
        subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return certificate, key


def test_grpc_over_tls(certified):
    grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient.grpc is not installed: make test-serve")
    if not has_grpc():
        pytest.skip("grpcio and protobuf are not installed: make test-serve")
    certificate, _ = certified
    images = grpc.InferInput("images", IMAGES.shape, "FP32")
    images.set_data_from_numpy(IMAGES)
    with listening(tls=certified, grpc_port=0, tokens=TOKENS) as found:
        options = {"ssl": True, "root_certificates": str(certificate)}
        with grpc.InferenceServerClient(found.grpc_address, **options) as client:
            headers = {"authorization": "Bearer owner"}
            result = client.infer("small", [images], sequence_id="a-tls", headers=headers)
            assert result.as_numpy("logits").shape == (2, 4)
            with pytest.raises(grpc.InferenceServerException, match="Bearer TOKEN"):
                client.infer("small", [images], sequence_id="a-tls")
            with pytest.raises(grpc.InferenceServerException, match="'a-'"):
                client.infer("small", [images], sequence_id="b-1", headers=headers)
        for wrong in ({}, {"ssl": True}):  # without TLS, and without trust in the certificate
            refuses = pytest.raises(grpc.InferenceServerException)
            with grpc.InferenceServerClient(found.grpc_address, **wrong) as client, refuses:
                client.infer("small", [images], sequence_id="a-tls", headers=headers, client_timeout=5)


def test_tls(certified):
    certificate, _ = certified
    with listening(tls=certified) as found:
        assert found.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(certificate))
        with Client(found.url, "small", context=trusted) as client:
            assert client.predict("tls", IMAGES).shape == (2, 4)
        with pytest.raises(ssl.SSLError), Client(found.url, "small") as client:
            client.predict("tls", IMAGES)


def test_a_client_sends_its_token(guarded):
    with Client(guarded.url, "small", token="operator") as client:
        assert np.isfinite(client.predict("z-1", IMAGES)).all()
        client.drop("z-1")
    with Client(guarded.url, "small") as client, pytest.raises(ClientError) as caught:
        client.predict("z-1", IMAGES)
    assert caught.value.status == 401


def test_a_wrong_port_is_refused():
    for wrong in (-1, 70_000, "80", True):
        with pytest.raises(ValueError, match="65535"):
            listening(port=wrong)


def test_a_reloaded_token_keeps_what_it_has_used_and_gets_its_new_rights(tmp_path):
    def write(*names, **fields):
        entries = [{"name": name, "token": name * 16, "streams": "", "role": "learn", **fields} for name in names]
        (tmp_path / "t").write_text(json.dumps({"tokens": entries}))

    write("a")
    access = new_access(tmp_path / "t")
    user = access.identify("Bearer " + "a" * 16)
    assert user.alone
    write("a", "b", role="predict", most_streams=2)
    access.reload()
    assert access.identify("Bearer " + "a" * 16) is user
    assert (user.used["requests"], user.alone, user.may_claim, user.token.most_streams) == (2, False, False, 2)
    with pytest.raises(ValueError, match="without"):
        Access([token("a")]).reload()
