"""A GGUF file as the source: `convert --to hf` writes a folder that computes and tokenizes as the model in the file does."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError

torch = pytest.importorskip(
    "torch", reason="the models are made with torch: pip install annie-quant[quantize]"
)
transformers = pytest.importorskip("transformers", reason="the models are transformers' own")
gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")

from dense_models import make  # noqa: E402
from paths import TINY_ANNIE  # noqa: E402

from annie_quant.offline import loading  # noqa: E402

KINDS = ["llama", "qwen2", "qwen2-tied", "qwen3"]
TEXTS = [
    "Hello 12345, straße 東京 ½!",
    "<|im_start|>user\n<tool_call>{}</tool_call><|im_end|>\n",
    "x  = 1\n\n\tend",
]


def test_the_merges_of_a_sentencepiece_file_are_those_it_was_trained_with() -> None:
    """The reference is the tokenizer that the library trained; the file has its tokens and ranks only."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    from annie_quant.offline import sentencepiece

    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", sentencepiece.SPACE)
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    text = Path(sentencepiece.__file__).read_text()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<bos>"], show_progress=False
    )
    trained.train_from_iterator(text.splitlines(), trainer)
    tokens = [trained.id_to_token(i) for i in range(trained.get_vocab_size())]
    kinds = [3, 3, *[1] * (len(tokens) - 2)]
    merges = sentencepiece.merges_of(tokens, kinds, [-float(i) for i in range(len(tokens))])
    again = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>"))
    again.normalizer = trained.normalizer
    again.pre_tokenizer = trained.pre_tokenizer
    for line in (*text.splitlines(), "mean returns from tokenizers", "scores or merges"):
        assert again.encode(line).ids == trained.encode(line).ids, line


def test_gemma_keeps_its_scale_windows_and_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base model's file has no template: it is given. The tokenizer is tiny-annie's, which no Gemma file has."""
    source = make(tmp_path / "gemma", "gemma3")
    file = Path(aq.checkpoint.convert(source, "gguf", tmp_path / "gemma.gguf").path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    monkeypatch.setattr(loading, "read_tokenizer", lambda *_: tokenizer)
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    loading.convert_gguf(file, tmp_path / "out", chat_template=template)
    one, other = ModelFolder(source), ModelFolder(tmp_path / "out")
    assert {n: one.tensor(n).tobytes() for n in one} == {
        n: other.tensor(n).tobytes() for n in other
    }
    for field in ("query_pre_attn_scalar", "layer_types", "sliding_window", "rope_parameters"):
        assert one.config[field] == other.config[field], field
    assert (tmp_path / "out/chat_template.jinja").read_text() == template.read_text()
    template.write_text("no template")
    with pytest.raises(aq.core.errors.UsageError, match="expected a Jinja template"):
        loading.convert_gguf(file, tmp_path / "none", chat_template=template)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return each model's folder and its GGUF file in bf16."""
    home, out = tmp_path_factory.mktemp("gguf"), {}
    for kind in KINDS:
        folder = make(home / kind, kind)
        out[kind] = folder, Path(aq.checkpoint.convert(folder, "gguf", home / f"{kind}.gguf").path)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_the_model_in_the_file(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str
) -> None:
    source, file = files[kind]
    result = loading.convert_gguf(file, tmp_path / "out")
    assert result.loss == [], "nothing was rounded"
    (tmp_path / "new").touch()
    modes = {f.name: f.stat().st_mode for f in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {(tmp_path / "new").stat().st_mode}, modes
    one, other = ModelFolder(source), ModelFolder(tmp_path / "out")
    assert {n: one.tensor(n).tobytes() for n in one} == {
        n: other.tensor(n).tobytes() for n in other
    }
    for field in ("model_type", "tie_word_embeddings", "num_key_value_heads", "hidden_size"):
        assert one.config[field] == other.config[field]
    tokenizer, ours = (
        transformers.AutoTokenizer.from_pretrained(f) for f in (source, tmp_path / "out")
    )
    for text in TEXTS:
        assert ours(text)["input_ids"] == tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "Hi."}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert ours.apply_chat_template(messages, **options) == tokenizer.apply_chat_template(
        messages, **options
    )
    ends = transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id
    assert tokenizer.eos_token_id in ends and ours.eos_token == tokenizer.eos_token
    assert set(ends) <= set(tokenizer.get_added_vocab().values()), "plain text ends no answer"


def test_a_file_is_parsed_once(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary of 150,000 tokens takes the package ten seconds; transformers asks for it four times."""
    parsed, usual = [], gguf.GGUFReader.__init__

    def counted(self: object, path: Path) -> None:
        parsed.append(path)
        usual(self, path)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    before = gguf.GGUFReader
    loading.convert_gguf(files["qwen2"][1], tmp_path / "out")
    assert len(parsed) == 1
    assert gguf.GGUFReader is before


def test_rounded_tensors_are_stated_and_compare_shows_only_the_last_rounding(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    file = Path(
        aq.checkpoint.convert(files["qwen2"][0], "gguf", tmp_path / "q8.gguf", type="Q8_0").path
    )
    result = loading.convert_gguf(file, tmp_path / "out")
    assert len(result.loss) == 1 and "Q8_0 tensors were rounded already" in result.loss[0]
    assert f"annie-quant compare {tmp_path / 'out'} {file}" in result.loss[0]
    rows = aq.checkpoint.compare(tmp_path / "out", {"file": file}).rows
    assert rows and all(0 < row.rel_l2 < 2**-8 for row in rows if row.format == "Q8_0")
    aq.quantize.run("direct", tmp_path / "out", tmp_path / "nvfp4")
    assert aq.checkpoint.audit(tmp_path / "nvfp4", source=tmp_path / "out").ok


def rewritten(
    file: Path, target: Path, fields: dict[str, object], leave_out: tuple[str, ...] = ()
) -> Path:
    """Write a copy of a GGUF file with other settings or without some."""
    reader = gguf.GGUFReader(file)
    architecture = str(
        fields.get("general.architecture", reader.get_field("general.architecture").contents())
    )
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or name in leave_out:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, fields.get(name, field.contents()), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def refusal(file: Path, tmp_path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as refused:
        loading.convert_gguf(file, tmp_path / "out")
    assert "\n" not in str(refused.value) and refused.value.hint
    assert not (tmp_path / "out").exists()
    return refused.value


def test_another_architecture_is_refused_with_what_still_works(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """transformers reads Phi 3 from GGUF, and this package does not know it."""
    file = rewritten(files["qwen2"][1], tmp_path / "x.gguf", {"general.architecture": "phi3"})
    error = refusal(file, tmp_path)
    assert "'phi3'" in str(error) and "qwen2" in str(error) and "serve" in error.hint


def test_a_family_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    file = aq.checkpoint.convert(TINY_ANNIE, "gguf", tmp_path / "x.gguf").path
    error = refusal(Path(file), tmp_path)
    assert "qwen35" in str(error) and "--runtime llama.cpp" in error.hint


def test_a_file_without_a_chat_template_is_refused(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    file = rewritten(files["qwen2"][1], tmp_path / "x.gguf", {}, ("tokenizer.chat_template",))
    assert "no chat template" in str(refusal(file, tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.999])
def test_a_cut_file_is_refused(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, share: float
) -> None:
    content = files["qwen2"][1].read_bytes()
    (tmp_path / "x.gguf").write_bytes(content[: int(share * len(content))])
    refusal(tmp_path / "x.gguf", tmp_path)


def test_an_unknown_tensor_type_is_refused(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    """The type follows a tensor's name, its number of dimensions and its dimensions."""
    content = bytearray(files["qwen2"][1].read_bytes())
    name = b"blk.0.attn_q.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    content[place : place + 4] = (4321).to_bytes(4, "little")
    (tmp_path / "x.gguf").write_bytes(content)
    assert "4321" in str(refusal(tmp_path / "x.gguf", tmp_path))


@pytest.mark.parametrize(
    ("field", "number"),
    [("block_count", 3), ("attention.head_count_kv", 4), ("feed_forward_length", 512)],
)
def test_settings_that_contradict_the_tensors_are_refused(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, field: str, number: int
) -> None:
    file = rewritten(files["qwen2"][1], tmp_path / "x.gguf", {f"qwen2.{field}": number})
    refusal(file, tmp_path)


def test_nvfp4_is_read_with_a_folder_only(
    files: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    shutil.copytree(files["qwen3"][0], tmp_path / "model")
    aq.quantize.run("direct", tmp_path / "model", tmp_path / "nvfp4")
    file = aq.checkpoint.convert(tmp_path / "nvfp4", "gguf", tmp_path / "x.gguf", type="NVFP4").path
    assert "NVFP4" in str(refusal(Path(file), tmp_path))
