"""The run file: its defaults, and for every kind of error the sentence that explains it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dtfm.protos import plan_pb2
from dtfm.protos.outer import has_momentum
from dtfm.protos.run_file.errors import RunFileError
from dtfm.protos.run_file.run_file import RunFile, parse_run, read_run_file
from dtfm.protos.run_file.table import table_of


def read(text: str) -> RunFile:
    return parse_run(tomllib.loads(text), "RUN.toml")


def test_an_empty_run_file_describes_the_demo() -> None:
    run = read("").message("ab12")
    assert (run.name, run.id, run.seed, run.lease_seconds) == ("demo", "ab12", 1, 10.0)
    assert (run.model.family, '"hidden_size": 128' in run.model.config_json) == ("llama", True)
    assert (run.data.source, run.data.tokenizer, run.data.sequence_length) == ("python-stdlib", "bytes", 256)
    assert (run.train.steps, run.train.global_batch, run.train.micro_batch) == (200, 32, 4)
    assert (run.train.precision, run.train.warmup_steps, run.train.evaluation_samples) == (plan_pb2.FP32, 20, 64)
    assert (run.network.activations, run.network.gradients, run.network.reduction) == ("auto", "auto", "auto")
    assert (run.checkpoint.uri, run.checkpoint.weights) == ("coordinator://disk", True)


def test_every_key_is_described() -> None:
    for section in (RunFile, *map(table_of, RunFile.model_fields.values())):
        for name, field in getattr(section, "model_fields", {}).items():
            assert table_of(field) or field.description, f"{section}: {name}"


def test_a_local_checkpoint_folder_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read('name = "stories"').checkpoints == (tmp_path / "dtfm-runs/stories").as_uri()
    assert read('[checkpoint]\nuri = "some/where"').checkpoint.uri == (tmp_path / "some/where").as_uri()
    assert read('[checkpoint]\nuri = "file:///elsewhere/"').checkpoint.uri == "file:///elsewhere"
    assert read('[checkpoint]\nuri = "memory://x/"').checkpoint.uri == "memory://x"


def test_defaults_follow_from_other_keys() -> None:
    assert read("[train]\nsteps = 30").train.warmup_steps == 3
    assert read("[train]\nmicro_batch = 6\nglobal_batch = 12").train.evaluation_samples == 66
    assert read('model = { family = "gpt2" }').model.config == {}
    assert read('model = { pretrained = "somewhere" }').model.family == ""
    assert read('model = { pretrained = "somewhere@abc" }').message("x").data.tokenizer == "somewhere"
    assert read('[train]\nschedule = "warmup-stable-decay"').train.decay_steps == 40
    assert read('[train]\nsteps = 10\nwarmup_steps = 9\nschedule = "warmup-stable-decay"').train.decay_steps == 1
    assert read("[cluster]\nstages = [2, 1, 1]").cluster.nodes == 4
    network = read('[network]\ncompression = "off"\nreduction = "i8b256"').network
    assert (network.activations, network.gradients, network.reduction) == ("off", "off", "i8b256")
    for codec in ("topk", "top64"):
        network = read(f'[network]\nexchange = "{codec}"').network
        assert (network.exchange, network.exchanges_sparsely) == (codec, True)


def test_tokens_count_alike_in_conversations_unless_the_run_file_says_otherwise() -> None:
    def of(**tables: object) -> tuple[str, bool]:
        run = parse_run(tables, "here")
        return run.train.loss_per, run.message("").train.loss_per_token

    talks = {"text_field": "messages"}
    assert of() == of(data={"text_field": "body"}) == ("sample", False)
    assert of(data=talks) == of(train={"loss_per": "token"}) == ("token", True)
    assert of(data=talks, train={"loss_per": "sample"}) == ("sample", False)
    assert of(data={"sources": [{"source": "a.txt"}, {"source": "b.jsonl", **talks}]}) == ("token", True)


ADAPTER = 'model = { pretrained = "somewhere" }\n[adapter]\n'


def test_exchanges_apply_numbers_or_choose_them() -> None:
    chooses = parse_run({"train": {"outer_rate": "auto"}}, "test")
    assert (chooses.train.outer_momentum, chooses.train.has_momentum) == ("auto", True)
    assert (chooses.message("id").train.outer_rate, has_momentum(chooses.message("id").train)) == (0, True)
    assert parse_run(chooses.model_dump(mode="json"), "the log") == chooses
    named = parse_run({"train": {"outer_rate": 1}}, "test")
    assert (named.train.outer_rate, named.train.outer_momentum, named.train.has_momentum) == (1.0, 0.0, False)
    assert not has_momentum(named.message("id").train)


def test_an_adapter_is_trained_only_where_its_table_is() -> None:
    whole, adapted = read('model = { pretrained = "somewhere" }').message("x"), read(ADAPTER).message("x")
    assert (whole.model.HasField("adapter"), whole.model.weights) == (False, "")
    assert (adapted.model.HasField("adapter"), adapted.model.weights) == (True, "bf16")
    assert (adapted.model.adapter.rank, adapted.model.adapter.alpha) == (16, 32)
    assert not adapted.model.adapter.targets  # all
    named = read(ADAPTER + 'rank = 4\nalpha = 4\ntargets = ["q_proj"]').message("x").model.adapter
    assert (named.rank, named.alpha, list(named.targets)) == (4, 4, ["q_proj"])
    also = read(ADAPTER + 'train_also = ["embed_tokens"]').message("x").model.adapter
    assert (list(also.train_also), also.dropout) == (["embed_tokens"], 0)
    assert read(ADAPTER + "dropout = 0.05").message("x").model.adapter.dropout == 0.05
    assert [read(ADAPTER + keys).message("x").model.adapter.dora for keys in ("", "dora = true")] == [False, True]
    packed = read('[adapter]\n[model]\npretrained = "somewhere"\nweights = "nf4"')
    assert packed.message("x").model.weights == "nf4"
    assert parse_run(packed.model_dump(mode="json"), "the log") == packed


def test_stages_are_pinned_by_number_or_by_list() -> None:
    assert read("").cluster.pinned is None
    assert read("[cluster]\nstages = 3").cluster.pinned == 3
    assert read("[cluster]\nstages = [2, 1, 1]").cluster.pinned == (2, 1, 1)


def test_several_sources_reach_nodes_with_their_weights() -> None:
    run = read(
        '[[data.sources]]\nsource = "a"\nweight = 3\n[[data.sources]]\nsource = "hf:b"\nlimit = 5\nsplit = "dev"'
    )
    assert run.data.places == [("data.sources[0].source", "a"), ("data.sources[1].source", "hf:b")]
    one, other = run.message("").data.sources
    assert (one.source, one.weight, one.text_field) == ("a", 3.0, "text")
    assert (other.source, other.weight, other.limit, other.split) == ("hf:b", 1.0, 5, "dev")


def test_a_run_read_back_from_the_log_is_unchanged() -> None:
    run = read('seed = 18446744073709551615\n[cluster]\nstages = [2, 2]\n[[data.sources]]\nsource = "a"')
    assert parse_run(run.model_dump(mode="json"), "the log") == run


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sed = 1", "sed: unknown key; did you mean seed?"),
        ("[adapter]", "adapter = {}: an adapter needs weights to stand beside: set model.pretrained, or remove"),
        (ADAPTER + "rank = 0", "adapter.rank = 0: must be at least 1"),
        (ADAPTER + "alpha = 0", "adapter.alpha = 0: must be above 0"),
        (ADAPTER + "dropout = 1", "adapter.dropout = 1: must be below 1"),
        (ADAPTER + "targets = []", 'adapter.targets = []: must be "all-linear", or names of modules'),
        (ADAPTER + "train_also = 'lm_head'", "adapter.train_also = 'lm_head': must be names of modules, like"),
        (
            '[adapter]\ndora = true\n[model]\npretrained = "somewhere"\nweights = "int8"',
            'dora = true does not go with model.weights = "int8": peft loses the scales of 8 bits on a CPU; set weights to "nf4"',
        ),
        (ADAPTER + "rnk = 1", "adapter.rnk: unknown key; did you mean rank?"),
        (
            'model = { pretrained = "somewhere", weights = "nf4" }',
            'model.weights = "nf4" is for weights that stay as they are: add a table [adapter]',
        ),
        (
            'model = { pretrained = "x", weights = "fp4" }',
            "model.weights = 'fp4': must be one of 'bf16', 'int8' or 'nf4'",
        ),
        ("[train]\nzzz = 1", "train.zzz: unknown key; the keys are activation_checkpointing, batch_grows,"),
        ('seed = "1"', "seed = '1': must be a whole number"),
        ("seed = -1", "seed = -1: must be at least 0"),
        ("seed = 18446744073709551616", "seed = 18446744073709551616: must be at most 18446744073709551615"),
        ('name = "../x"', "name = '../x': must be letters, digits"),
        ("train = 3", "train = 3: must be a table"),
        ("[train]\nmicro_batch = true", "train.micro_batch = True: must be a whole number"),
        (
            "[train]\nglobal_batch = 33",
            "train.global_batch = 33: must be a multiple of train.micro_batch (4), like 32 or 36",
        ),
        (
            "[train]\nevaluation_samples = 3",
            "train.evaluation_samples = 3: must be a multiple of train.micro_batch (4), like 4",
        ),
        (
            "[train]\nmicro_batch = 1\nevaluation_samples = 262145",
            "train.evaluation_samples = 262145: must be at most 262144, 262144 micro-batches",
        ),
        ("[train]\nlearning_rate = nan", "train.learning_rate = nan: must be"),
        ("[train]\nsteps = 5\nwarmup_steps = 6", "train.warmup_steps = 6: must be at most train.steps (5)"),
        ('[train]\nprecision = "fp8"', "train.precision = 'fp8': must be one of 'auto', 'fp32', 'bf16' or 'fp64'"),
        ('[train]\nschedule = "step"', "train.schedule = 'step': must be one of 'constant', 'cosine', 'linear' or"),
        ("[train]\ndecay_steps = 5", 'train.decay_steps = 5: needs train.schedule = "warmup-stable-decay"'),
        (
            '[train]\nschedule = "warmup-stable-decay"\ndecay_steps = 181',
            "train.decay_steps = 181: must be 1 to 180, the steps that the warm-up leaves",
        ),
        (
            'model = { pretrained = "a", family = "module" }',
            "model.family = 'module': cannot begin with model.pretrained",
        ),
        ('model = { family = "" }', "model.family = '': must be a model_type of transformers"),
        ("[cluster]\nlease = 0.1", "cluster.lease = 0.1: must be at least 0.5"),
        ('[cluster]\nstages = "two"', "cluster.stages = 'two': must be \"auto\", a number of stages"),
        ("[cluster]\nstages = [2, 0]", "cluster.stages = [2, 0]: must be"),
        ("[cluster]\nstages = [2, 2]\nnodes = 3", "cluster.nodes = 3: must be at least 4"),
        (
            '[network]\nactivations = "zip"',
            "network.activations = 'zip': must be one of 'auto', 'off', 'raw16', 'i8b256' or 'i4b64'",
        ),
        (
            '[network]\nreduction = "topk"',
            "network.reduction = 'topk': must be one of 'auto', 'off', 'raw16', 'i8b256' or 'i4b64'",
        ),
        ("[model]\nconfig = { day = 2020-01-01 }", "must hold only numbers, strings"),
        ('[model]\nfamily = "module"', "model.module = '': with family = \"module\", must name a function"),
        ('[model]\nmodule = "a.b:c"', "model.module = 'a.b:c': needs family = \"module\""),
        (
            '[data]\nsource = "sftp://host/a.txt"',
            "data.source = 'sftp://host/a.txt': names 'sftp://host/a.txt', which no run",
        ),
        ('[data]\nheld_out = "dir::/etc/a.txt://"', "data.held_out = 'dir::/etc/a.txt://': names"),
        ('[data]\nheld_out_split = "test"', "data.held_out_split = 'test': is for data sets of the hub"),
        ('[data]\ntemplate = "x"', "data.template = 'x': must name a field in braces"),
        ('[data]\ntext_field = "messages"\ntemplate = "{x}"', "cannot be used with text_field"),
        ("[data]\nlimit = -1", "data.limit = -1: must be at least 0"),
        (
            '[[data.sources]]\nsource = "a.txt"\nweight = 0',
            "data.sources[0].weight = 0: of the source 'a.txt' must be",
        ),
        (
            '[[data.sources]]\nsource = "a.txt"\nweight = nan',
            "data.sources[0].weight = nan: of the source 'a.txt' must be",
        ),
        ('[[data.sources]]\nsource = "a"\nwait = 1', "data.sources[0].wait: unknown key; did you mean weight?"),
        ("[[data.sources]]\nweight = 1", "data.sources[0].source = {'weight': 1}: must be given"),
        (
            '[[data.sources]]\nsource = "module:a:b"',
            "data.sources[0].source = 'module:a:b': a function makes its samples itself",
        ),
        (
            '[data]\nsource = "a"\n[[data.sources]]\nsource = "b"',
            "each source has a table with its own keys; move data.source",
        ),
        (
            '[data]\nisolate_documents = true\n[[data.sources]]\nsource = "a"\ntext_field = "messages"',
            "data.isolate_documents = True: is for text",
        ),
        ("[train]\nrounds = 1", 'train.rounds = 1: must be "auto", 0, or 2 to 10,000'),
        ('[train]\nrounds = "some"', "train.rounds = 'some': must be"),
        ("[train]\nouter_rate = 0", 'train.outer_rate = 0: must be "auto", or a number above 0 and at most 10'),
        ("[train]\nouter_rate = true", "train.outer_rate = True: must be"),
        (
            "[train]\nouter_momentum = 1.0",
            'train.outer_momentum = 1.0: must be "auto", or a number at least 0 and below 1',
        ),
        ('[train]\nouter_momentum = "auto"', "an exchange chooses the two together; set both, or neither"),
        ('[train]\nouter_rate = "auto"\nouter_momentum = 0.9', 'must be "auto" with train.outer_rate = "auto"'),
        ("[train]\nsteps = 8\nrounds = 3\n[cluster]\nstages = 2", 'stages must be "auto" with train.rounds'),
        (
            '[train]\nsteps = 8\nrounds = 3\n[network]\nexchange = "topk"\n[trust]\nmode = "open"',
            'set another codec, like "i4b64"',
        ),
        (
            '[train]\nsteps = 8\nrounds = 3\n[network]\nexchange = "top64"\n[trust]\naudit_rate = 0.5',
            'exchanges cannot be audited with network.exchange = "top64"',
        ),
        (
            '[checkpoint]\nuri = "s4://bucket"',
            "checkpoint.uri = 's4://bucket': names 's4://bucket', which no run may use",
        ),
        (
            '[checkpoint]\nuri = "file:~nobody-of-this-name/x"',
            "names '~nobody-of-this-name/x', and no home folder of that user is known here",
        ),
        ("[data]\nsequence_length = 1", "data.sequence_length = 1: must be at least 2"),
        ('[data]\nisolate_documents = true\ntext_field = "messages"', "data.isolate_documents = True: is for text"),
        (
            "[data]\nchapter_bytes = 9",
            "data.chapter_bytes = 9: is for files on the nodes' disks, and 'python-stdlib' names none",
        ),
        (
            '[data]\nsource = "s3://bucket/x.jsonl"\nchapter_bytes = 9',
            "data.chapter_bytes = 9: is for files on the nodes' disks",
        ),
        (
            '[data]\nsource = "x.jsonl"\nlimit = 3\nchapter_bytes = 9',
            "data.chapter_bytes = 9: cannot be used with data.limit",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_be_right(text: str, sentence: str) -> None:
    with pytest.raises(RunFileError) as caught:
        read(text)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith("RUN.toml has 1 problem:\n")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(RunFileError, match=r"has 2 problems:\n  seed = .*\n  train\.steps = "):
        read("seed = -1\n[train]\nsteps = 0")


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    path.write_text("name = 'x'\n", encoding="utf-8-sig")
    assert read_run_file(path).name == "x"


def test_errors_about_an_unreadable_file_say_where_and_why(tmp_path: Path) -> None:
    path = tmp_path / "RUN.toml"
    with pytest.raises(RunFileError, match="No such file or directory"):
        read_run_file(path)
    path.write_text("name = 'x'\nseed =\n")
    with pytest.raises(RunFileError, match=r"not valid TOML: .*line 2"):
        read_run_file(path)
    path.write_bytes(b"name = 'x'\n# \xff")
    with pytest.raises(RunFileError, match=r"not UTF-8 text \(line 2\)"):
        read_run_file(path)
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(RunFileError, match="at most 1048576"):
        read_run_file(path)
