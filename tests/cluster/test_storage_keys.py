"""Storage in an S3 bucket, with one wrong key: its node is told before step 1, and the others train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from moto.server import ThreadedMotoServer

from tests.cluster.launch import Cluster, Process
from tests.cluster.runs import GPT2, run_file

PLACE = "s3://bucket/run"
ALLOWED = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A wrong key, as environment. This process and its child processes have the right key."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        place = "http://{}:{}".format(*server.get_host_and_port())
        monkeypatch.setenv("AWS_ENDPOINT_URL", place)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
        iam: Any = boto3.client("iam")
        iam.create_user(UserName="run")
        iam.put_user_policy(UserName="run", PolicyName="all", PolicyDocument=json.dumps(ALLOWED))
        key = iam.create_access_key(UserName="run")["AccessKey"]
        boto3.client("s3").create_bucket(Bucket="bucket")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        requests.post(
            f"{place}/moto-api/reset-auth", data=b"0", timeout=10
        ).raise_for_status()  # from now on keys count
        yield {"AWS_SECRET_ACCESS_KEY": "wrong"}
    finally:
        server.stop()


@pytest.mark.soak
def test_who_has_a_wrong_key_for_the_storage_is_told_so_and_the_others_train(
    tmp_path: Path, wrong: dict[str, str]
) -> None:
    text = run_file(model=GPT2, stages=[1, 1], steps=4, storage=PLACE)
    with Cluster(tmp_path, text, start=False) as cluster:
        serve = [sys.executable, "-m", "dtfm.coordinator.cli", "serve", str(cluster.run_file), "--store", "other.db"]
        coordinator = Process(serve, tmp_path, environment=wrong)
        assert coordinator.wait(60) == 2
        assert f"cannot look into {PLACE}: PermissionError" in coordinator.errors
        cluster.start_coordinator()
        stranger = cluster.add("stranger", environment=wrong)
        assert stranger.wait(60) == 2
        assert f"checkpoint.uri = {PLACE} cannot be used from this machine: PermissionError" in stranger.errors
        assert all("AWS_ACCESS_KEY_ID" in process.errors for process in (coordinator, stranger))
        for name in "ab":
            cluster.add(name)
        assert cluster.finish() == 0
    assert cluster.of("checkpoint_written")[-1]["folder"] == f"{PLACE}/step-00000004"
    assert not cluster.of("node_quarantined")
