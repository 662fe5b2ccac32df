"""`python -m mmx_jax.decode`, as a user runs it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mmx_jax.config import bundled
from mmx_jax.decode import main
from tests.conftest import GOLDENS


def ids_of(name: str) -> tuple[list[list[int]], list[list[int]]]:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    return golden["input_ids"].tolist(), golden["greedy"].tolist()


@pytest.mark.parametrize("name", ["tiny_vl", "block128", "real_heads"])
def test_greedy_tokens_of_transformers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (prompt,), (greedy,) = ids_of(name)
    arguments = [
        "--checkpoint",
        str(GOLDENS / name),
        "--prompt-ids",
        ",".join(map(str, prompt)),
        "--ignore-eos",
    ]
    arguments += [
        "--dtype",
        "float32",
        "--max-length",
        str(len(prompt) + 24),
        "--max-new-tokens",
        str(len(greedy)),
    ]
    assert main([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["prompt_ids"] == prompt
    assert answer["token_ids"] == greedy
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["new_tokens"] == len(greedy)
    assert f"{len(prompt)} prompt tokens, {len(greedy)} new tokens" in err


def test_json_lines_decode_as_one_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, greedy = ids_of("tiny_text")
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(prompts[0]) + "\n\n" + json.dumps({"prompt_ids": prompts[1]}) + "\n")
    arguments = ["--checkpoint", str(GOLDENS / "tiny_text"), "--prompt-file", str(file), "--dtype", "float32"]
    assert main([*arguments, "--max-length", "85", "--max-new-tokens", "16", "--ignore-eos", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["token_ids"] for a in answers] == greedy
    assert [a["prompt_ids"] for a in answers] == prompts
    assert main([*arguments, "--max-length", "85", "--max-new-tokens", "3", "--ignore-eos"]) == 0
    expected = [f"[{i}] {' '.join(map(str, row[:3]))}" for i, row in enumerate(greedy)]
    assert capsys.readouterr().out.splitlines() == expected


def run(checkpoint: Path, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    assert main(["--checkpoint", str(checkpoint), "--max-length", "128", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_messages_and_logprobs(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = run(
        checkpoint, "--prompt", "the [e~[ cat", "--max-new-tokens", "4", "--logprobs", "2", capsys=capsys
    )
    assert [len(t["top"]) for t in plain["logprobs"]] == [2] * len(plain["token_ids"])
    file = tmp_path / "prompt.txt"
    file.write_text("the [e~[ cat")
    assert (
        run(checkpoint, "--prompt-file", str(file), "--max-new-tokens", "4", capsys=capsys)["token_ids"]
        == (plain["token_ids"])
    )

    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": "the [e~[ cat"}]))
    chat = run(
        checkpoint,
        "--messages",
        str(file),
        "--thinking-mode",
        "enabled",
        "--max-new-tokens",
        "1",
        capsys=capsys,
    )
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = {m: library.token_to_id(m) for m in ("[e~[", "]~b]", "]~!b[", "<mm:think>")}
    assert [m for i in chat["prompt_ids"] for m in ids if ids[m] == i] == [
        "]~!b[",
        "]~b]",
        "[e~[",
        "]~b]",
        "<mm:think>",
    ]
    wrapped = {"messages": [{"role": "user", "content": "the [e~[ cat"}]}
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join(map(json.dumps, ["the cat", {"prompt": "the cat"}, wrapped])))
    assert main(["--checkpoint", str(checkpoint), "--prompt-file", str(lines), "--plan"]) == 0
    capsys.readouterr()


def test_text_streams_to_stdout(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--prompt", "the cat", "--max-new-tokens", "20", "--ignore-eos"]
    answer = run(checkpoint, *arguments, capsys=capsys)
    assert main(["--checkpoint", str(checkpoint), "--max-length", "128", *arguments]) == 0
    assert capsys.readouterr().out == answer["text"] + "\n"


def test_answers_keep_the_order_of_the_prompts(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second prompt ends at a stop id, long before the first; the line separator is no line's end."""
    (whole,), _ = ids_of("tiny_vl")
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"\ufeff{whole[:20]}\n{whole}\n" + json.dumps("a\u2028b", ensure_ascii=False), "utf-8")
    arguments = ["--checkpoint", str(checkpoint), "--prompt-file", str(file), "--max-length", "128", "--json"]
    assert main([*arguments, "--dtype", "float32", "--max-new-tokens", "20"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [a["prompt_ids"] for a in answers[:2]] == [whole[:20], whole]
    assert answers[1]["finish_reason"] == "stop"
    assert len(answers[1]["token_ids"]) < len(answers[0]["token_ids"])
    assert len(answers) == 3


def test_every_stop_counts(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--prompt", "the cat", "--max-new-tokens", "20", "--ignore-eos"]
    text = run(checkpoint, *common, capsys=capsys)["text"]
    first, second = text[2], text[5]
    stopped = run(checkpoint, *common, "--stop", first, "--stop", second, capsys=capsys)
    assert stopped["text"] == text[: min(text.index(first), text.index(second))]


def test_plan_of_the_released_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--checkpoint", str(bundled("minimax_m3.json")), "--plan"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"all weights\s*\S\s*426,174,572,928", out)
    # A token takes 60 x 2 KB of K and V and 57 x 256 B of index keys.
    assert re.search(
        rf"routed experts\s*\S\s*{57 * 128 * 3 * 3072 * 6144:,}\s*\S\s*{57 * 128 * 6 * 3072 * 6144:,}", out
    )
    assert re.search(rf"K and V pages\s*\S\s*\S\s*{122_880 * 4096:,}", out)
    assert re.search(rf"index key pages\s*\S\s*\S\s*{14_592 * 4096:,}", out)
    assert "decode 1x8" in out


def test_plan_of_a_checkpoint_says_what_is_skipped(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--checkpoint", str(checkpoint), "--layers", "3", "--plan"]) == 0
    out = capsys.readouterr().out
    assert "3 layers (1 block-sparse, 1 with 9 experts)" in out
    assert re.search(r"skipped: \d+ tensors, only the first 3 layers were asked for", out)
    assert re.search(r"skipped: \d+ tensors, .*vision", out)
    assert "stop ids: 351, 350" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import jax
    import jaxlib

    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert f"jax {jax.__version__}" in out
    assert f"jaxlib {jaxlib.__version__}" in out
    assert "device 0: " in out


def test_version_mismatch_is_said() -> None:
    from mmx_jax.versions import mismatches

    assert mismatches({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax-cuda13-plugin": "0.12.0"}) == []
    (line,) = mismatches({"jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda13-plugin": "0.11.2"})
    assert "jax-cuda13-plugin 0.11.2 does not match jax 0.12.0" in line


@pytest.fixture(scope="module")
def broken(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints with one fault each."""
    root = tmp_path_factory.mktemp("broken")
    for name in ("cut", "no_config", "nan"):
        shutil.copytree(checkpoint, root / name)
    shard = next((root / "cut").glob("model-00004*"))
    shard.write_bytes(shard.read_bytes()[:-10])
    (root / "no_config" / "config.json").unlink()
    (root / "bad.json").write_text("{")
    (root / "odd.jsonl").write_text("3\n")
    (root / "two.jsonl").write_text('"ok"\n{"prompt": ""}\n')
    (root / "deep.jsonl").write_text("[" * 100_000)
    (root / "a.txt").write_text("a")
    (root / "dangling").mkdir()
    shutil.copy(checkpoint / "config.json", root / "dangling")
    (root / "dangling" / "model.safetensors").symlink_to(root / "nothing")
    return root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "no/such/dir", "--prompt", "a"], "no/such/dir: no such file or directory"),
        (["--checkpoint", "MiniMaxAI/MiniMax-M3", "--prompt", "a"], "download it first"),
        (["--checkpoint", "{broken}/no_config", "--prompt", "a"], "config.json: no such file"),
        (["--checkpoint", "{broken}/cut", "--prompt", "a"], "model-00004-of-00023.safetensors"),
        (["--checkpoint", "{checkpoint}"], "no prompt: give --prompt"),
        (["--checkpoint", "{checkpoint}", "--prompt", ""], "the prompt is empty"),
        (["--checkpoint", "{checkpoint}", "--prompt-ids", "1,352"], "token id 352 is outside the vocabulary"),
        (["--checkpoint", "{checkpoint}", "--prompt-ids", "-1"], "token id -1 is outside"),
        (["--checkpoint", "{checkpoint}", "--prompt-ids", "1,x"], "--prompt-ids '1,x': expected integers"),
        (["--checkpoint", "{checkpoint}", "--prompt-ids", "1,2,3", "--max-length", "3"], "max_length is 3"),
        (
            ["--checkpoint", "{checkpoint}", "--prompt", "a", "--max-length", "513"],
            "the model takes 1 to 512",
        ),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--layers", "6"], "the model has 5"),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--top-p", "2"], "top_p 2.0: it must be above 0"),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--dtype", "int4"], "dtype 'int4': expected"),
        (
            ["--checkpoint", "{checkpoint}", "--prompt", "a", "--attention", "full"],
            "attention 'full': expected",
        ),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--kernels", "cuda"], "kernels 'cuda': expected"),
        (
            ["--checkpoint", "{checkpoint}", "--prompt", "a", "--kernels", "pallas"],
            "the device is cpu, the kernels need an NVIDIA GPU",
        ),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--logprobs", "1"], "--logprobs needs --json"),
        (["--checkpoint", "{checkpoint}", "--prompt", "a", "--thinking-mode", "enabled"], "needs --messages"),
        (["--checkpoint", "{checkpoint}", "--messages", "{broken}/bad.json"], "bad.json: not JSON"),
        (["--checkpoint", "{checkpoint}", "--messages", "{broken}/none.json"], "none.json: No such file"),
        (
            ["--checkpoint", "{checkpoint}", "--prompt-file", "{broken}/odd.jsonl"],
            "odd.jsonl:1: expected a text",
        ),
        (["--checkpoint", "{golden}/block128", "--prompt", "a"], "no tokenizer.json; give the prompt as"),
        (["--checkpoint", "{golden}/block128", "--messages", "{broken}/bad.json"], "bad.json: not JSON"),
        (
            ["--checkpoint", "{golden}/block128", "--prompt-ids", "1", "--stop", "x"],
            "no --stop text can be found",
        ),
        (
            ["--checkpoint", "{checkpoint}", "--prompt-file", "{broken}/two.jsonl"],
            "two.jsonl:2: the prompt is empty",
        ),
        (["--checkpoint", "{checkpoint}", "--prompt-file", "{broken}/deep.jsonl"], "deep.jsonl:1: not JSON"),
        (
            ["--checkpoint", "{checkpoint}", "--prompt-file", "{broken}/a.txt", "--thinking-mode", "enabled"],
            "--thinking-mode needs --messages",
        ),
        (["--checkpoint", "{broken}/dangling", "--prompt-ids", "1"], "model.safetensors: No such file"),
        (["--checkpoint", "x" * 300, "--prompt-ids", "1"], "File name too long"),
        (["--prompt", "a", "--prompt-ids", "1"], "not allowed with argument"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-new-tokens", "many"], "invalid int value: 'many'"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    arguments: list[str], message: str, checkpoint: Path, broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"checkpoint": checkpoint, "broken": broken, "golden": GOLDENS}
    assert main([a.format(**places) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()[-1:]
    assert line.startswith("error: ")
    assert message in line
    assert len(err.splitlines()) == 1


def test_as_a_process(checkpoint: Path, tmp_path: Path) -> None:
    """The exit code, and nothing on stdout but the answer; a demo that says what it is."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "mmx_jax.decode"]
    demo = subprocess.run(
        [*command, "--max-new-tokens", "3", "--json"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    assert len(json.loads(demo.stdout)["token_ids"]) == 3
    assert "demo: a tiny model with random weights" in demo.stderr.splitlines()[0]
    assert "--checkpoint DIR" in demo.stderr.splitlines()[0]
    with subprocess.Popen(
        [*command, "--max-new-tokens", "4000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("demo:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert (process.returncode, err) == (130, "\ninterrupted\n")
    bad = subprocess.run(
        [*command, "--checkpoint", "nowhere"], capture_output=True, text=True, env=environment
    )
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: nowhere: no such file or directory\n"
