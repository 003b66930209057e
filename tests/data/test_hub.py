"""Whether the hub can be asked."""

import socket

import pytest

from sizewise.data import hub, pretrained, sources
from sizewise.errors import ConfigError, DataError

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy", "no_proxy")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name can be looked up, and nobody does it for us."""

    def unknown(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in (*PROXIES, *map(str.upper, PROXIES)):
        monkeypatch.delenv(name, raising=False)


def test_a_name_that_is_known_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, _: asked.append(host))
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/hub")
    assert hub.reachable()
    assert asked == ["mirror.example"]


@pytest.mark.usefixtures("no_network")
def test_without_a_network_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hub.reachable()
    monkeypatch.delenv("SIZEWISE_DATA", raising=False)
    with pytest.raises(DataError, match=r"there is no network\); .*SIZEWISE_DATA or data\.root"):
        sources.load("mnist")
    with pytest.raises(ConfigError, match=r"'owner/name' .*there is no network, and nothing"):
        pretrained.folder("owner/name")


@pytest.mark.usefixtures("no_network")
def test_behind_a_proxy_the_client_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    assert hub.reachable()
