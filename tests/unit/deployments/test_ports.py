"""One server a port, many replicas on it."""

import socket

import pytest

from tinsmith.deployments.ports import PortUnavailable, listen_shared, port_of, reserve, url_of

HOST = "127.0.0.1"


def test_replicas_listen_beside_the_reservation_and_serve() -> None:
    with reserve(HOST, 0) as reservation:
        port = port_of(reservation)
        with listen_shared(HOST, port, 8) as first, listen_shared(HOST, port, 8) as second, socket.create_connection((HOST, port)):
            assert port_of(first) == port_of(second) == port


def test_a_second_server_is_refused_while_the_first_has_no_replica_yet() -> None:
    with reserve(HOST, 0) as reservation, pytest.raises(PortUnavailable, match=r"gateway\.port: .* is taken .* choose another port"):
        reserve(HOST, port_of(reservation))


def test_a_second_server_is_refused_while_replicas_listen() -> None:
    with reserve(HOST, 0) as reservation:
        port = port_of(reservation)
        listener = listen_shared(HOST, port, 8)
    with listener, pytest.raises(PortUnavailable, match="is taken"):
        reserve(HOST, port)


def test_a_port_that_another_program_listens_on_is_refused_to_both() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = port_of(other)
        with pytest.raises(PortUnavailable, match="is taken"):
            reserve(HOST, port)
        with pytest.raises(PortUnavailable, match="is taken"):
            listen_shared(HOST, port, 8)


def test_connections_that_a_former_server_left_do_not_count() -> None:
    with socket.create_server((HOST, 0)) as former:
        port = port_of(former)
        with socket.create_connection((HOST, port)), former.accept()[0]:
            pass  # the server's end closes first and stays in TIME_WAIT
    with reserve(HOST, port) as reservation:
        assert port_of(reservation) == port


def test_connections_that_a_replica_closed_or_left_open_do_not_keep_the_next_server_from_the_port() -> None:
    with reserve(HOST, 0) as former:
        port = port_of(former)
        listener = listen_shared(HOST, port, 8)
    listener.setblocking(True)
    with listener, socket.create_connection((HOST, port)), socket.create_connection((HOST, port)) as left:
        listener.accept()[0].close()
        served = listener.accept()[0]
    with left, served, reserve(HOST, port) as reservation, listen_shared(HOST, port, 8) as next_listener:
        assert port_of(reservation) == port_of(next_listener) == port


def test_a_second_server_is_refused_in_every_state_of_the_first() -> None:
    with reserve(HOST, 0) as reservation:
        port = port_of(reservation)
        for _ in range(2):
            with listen_shared(HOST, port, 8), listen_shared(HOST, port, 8) as dying:
                dying.close()
                with pytest.raises(PortUnavailable, match="is taken"):
                    reserve(HOST, port)
            with pytest.raises(PortUnavailable, match="is taken"):
                reserve(HOST, port)


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(PortUnavailable, match=r"gateway\.host: cannot listen on 192\.0\.2\.77:0 .*; choose an address of this machine"):
        reserve("192.0.2.77", 0)


def test_a_privileged_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: socket.socket, __: tuple[str, int]) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(PortUnavailable, match="choose a port above 1023"):
        reserve(HOST, 80)


def test_urls_bracket_ipv6_addresses() -> None:
    assert url_of(HOST, 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80) == "http://[::1]:80"
