"""What is heard on the local network is bounded, printable, and leads nowhere strange."""

from __future__ import annotations

import pytest

from dtfm.protos.announcement import Announcement, read_announcement, write_txt

PIN = bytes(range(32))


def heard(hosts: list[str], port: int | None = 7400, **txt: bytes) -> Announcement:
    said = {key.encode(): value.encode() for key, value in write_txt("stories", "0.1", PIN).items()}
    changes: dict[bytes, bytes | None] = {key.encode(): value for key, value in txt.items()}
    return read_announcement({**said, **changes}, hosts, port)


def test_what_a_coordinator_says_is_what_is_read() -> None:
    there = heard(["192.168.1.2", "2001:db8::2"])
    assert there == Announcement("stories", "0.1", PIN, ("192.168.1.2:7400", "[2001:db8::2]:7400"))


def test_each_text_fits_into_a_txt_record() -> None:
    txt = write_txt("ö" * 1000, "1" * 1000, PIN)
    assert all(len(f"{key}={value}".encode()) <= 255 for key, value in txt.items())


@pytest.mark.parametrize("run", [b"\x1b[2Jgone", b"two\nlines", "\u202ereversed".encode(), b"\xff\xfe", b"x" * 10_000])
def test_a_name_is_printed_without_harm(run: bytes) -> None:
    there = heard(["192.168.1.2"], run=run, version=run)
    for text in (there.run, there.version):
        assert text.isprintable()
        assert len(text) <= 48


def test_addresses_that_no_coordinator_has_are_left_out_and_few_are_kept() -> None:
    strange = ["127.0.0.1", "169.254.1.1", "fe80::1%2", "224.0.0.251", "0.0.0.0", "localhost", ""]
    assert heard([*strange, "192.168.1.2"]).addresses == ("192.168.1.2:7400",)
    assert len(heard([f"192.168.1.{n}" for n in range(200)]).addresses) == 8


@pytest.mark.parametrize(
    ("hosts", "port", "authority"),
    [
        (["127.0.0.1"], 7400, PIN.hex().encode()),
        ([], 7400, PIN.hex().encode()),
        (["192.168.1.2"], 22, PIN.hex().encode()),
        (["192.168.1.2"], None, PIN.hex().encode()),
        (["192.168.1.2"], 7400, b""),
        (["192.168.1.2"], 7400, b"00"),
        (["192.168.1.2"], 7400, b"\xff" * 64),
    ],
)
def test_what_no_coordinator_says_is_refused(hosts: list[str], port: int | None, authority: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        heard(hosts, port, authority=authority)
