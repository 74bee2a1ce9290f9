"""The rules of what models and data do for `forge export` and `forge sample`. A plugin that does neither is let off."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from trainforge.errors import CheckpointError, UserError
from trainforge.seeding import derive_seed
from trainforge.stages import Comm, Data, ModelSpec, ParameterSpec
from trainforge.testing.bench import build_stage, load_plugin, tiny_context
from trainforge.testing.conformance.base import PluginConformance, refusal
from trainforge.toolbox.parameters import round_to_bf16

if TYPE_CHECKING:
    from trainforge.stages import Tokenizer


class TrainedWeights:
    """Weights as `forge export` hands them out: anew at each call. Counts those that are alive at the same time.

    Attributes:
        asked: the parameters that somebody asked for.
        most: most elements that were alive at once.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._specs = {name: spec for spec in model.parameters for name in spec.names}
        self._module = model.module
        self.asked: set[str] = set()
        self.most = self._alive = 0

    def __call__(self, name: str) -> Tensor:
        """The parameter, or a persistent buffer."""
        spec = self._specs.get(name)
        if spec is None:
            buffer = self._module.get_buffer(name)
            return torch.ones(buffer.shape, dtype=buffer.dtype)
        self.asked.add(spec.name)
        array = self.value(spec).numpy()
        self._alive += spec.elements
        self.most = max(self.most, self._alive)
        weakref.finalize(
            array, self._forget, spec.elements
        )  # a tensor made from it keeps it, and so do its views
        return torch.from_numpy(array).view(spec.shape)

    @staticmethod
    def value(spec: ParameterSpec) -> Tensor:
        """The trained value, flat."""
        generator = torch.Generator().manual_seed(derive_seed(0, "trained", spec.name))
        return torch.randn(spec.elements, generator=generator)

    def _forget(self, elements: int) -> None:
        self._alive -= elements


class ModelExportRules(PluginConformance):
    """Whether `ModelSpec.export` writes what was trained, once, and a little at a time."""

    def described(self, folder: Path, **facts: Any) -> ModelSpec:
        """The model as planning sees it: built alone, without a memory."""
        raise NotImplementedError

    def reread(self, out: Path) -> Mapping[str, Any] | None:
        """The recipe's `model` section that starts from a folder that the model was exported to.

        None, the default, where a recipe cannot start from one: then nothing is read back.
        """
        return None

    def exported(self, folder: Path, dtype: str) -> tuple[ModelSpec, TrainedWeights, Path] | None:
        """The model, what it was given, and the folder that it wrote; None when it has no format to be exported in."""
        model = self.described(folder)
        if type(model).export is ModelSpec.export:
            return None
        out, weights = folder / f"exported-{dtype}", TrainedWeights(model)
        out.mkdir()
        model.export(out, weights, dtype)  # type: ignore[arg-type]
        return model, weights, out

    def test_an_export_reads_back(self, tmp_path: Path) -> None:
        """A model that starts from the folder has the weights that went in: fp32 to the bit, bf16 rounded."""
        for dtype in ("fp32", "bf16"):
            made = self.exported(tmp_path, dtype)
            section = None if made is None else self.reread(made[2])
            if made is None or section is None:
                return
            again = self.described(tmp_path, model=section)
            for spec in again.parameters:
                value, wanted = torch.empty(spec.elements), TrainedWeights.value(spec)
                again.load(spec.name, value, spec.extent)
                rounded = torch.empty(spec.elements, dtype=torch.bfloat16)
                round_to_bf16(wanted, rounded)
                same = torch.equal(value, wanted)
                assert same or (dtype == "bf16" and torch.equal(value, rounded.float())), (
                    f"{spec.name} exported in {dtype} and read again is not what weights({spec.name!r}) gave"
                )

    def test_an_export_asks_for_few_weights_at_a_time(self, tmp_path: Path) -> None:
        """Every parameter is asked for, no more than a block of them is kept, and the module stays on meta."""
        made = self.exported(tmp_path, "bf16")
        if made is None:
            return
        model, weights, _ = made
        missing = sorted({spec.name for spec in model.parameters} - weights.asked)
        assert not missing, f"export() never asked for {missing[:5]}"
        blocks: dict[int | None, int] = {}
        for spec in model.parameters:
            blocks[spec.block] = blocks.get(spec.block, 0) + (spec.elements if spec.block is not None else 0)
        limit = max(blocks.values()) + max(spec.elements for spec in model.parameters)
        assert weights.most <= limit, (
            f"export() held {weights.most} elements at once; a block and one more tensor are {limit}: write each "
            "weight before you ask for the next"
        )
        filled = [name for name, parameter in model.module.named_parameters() if not parameter.is_meta]
        assert not filled, f"export() gave storage to {filled[:5]}: leave the module on meta"

    def test_an_export_stores_tied_weights_once(self, tmp_path: Path) -> None:
        """The files are smaller than they would be with every alias written out."""
        made = self.exported(tmp_path, "fp32")
        if made is None or not any(spec.aliases for spec in made[0].parameters):
            return
        elements = sum(spec.elements * len(spec.names) for spec in made[0].parameters)
        size = sum(file.stat().st_size for file in made[2].rglob("*") if file.is_file())
        assert size < 4 * elements, (
            f"the files have {size} bytes; with tied weights stored twice the weights alone are {4 * elements}"
        )

    def test_an_export_lets_errors_through(self, tmp_path: Path) -> None:
        """A damaged checkpoint, found while a weight is read, ends the export."""
        model = self.described(tmp_path)
        if type(model).export is ModelSpec.export:
            return

        def damaged(name: str) -> Tensor:
            raise CheckpointError(f"{name} is damaged")

        (tmp_path / "out").mkdir()
        error = refusal(model.export, tmp_path / "out", damaged, "fp32")
        assert isinstance(error, CheckpointError), (
            f"weights(name) raised a CheckpointError, and export() ended with {error!r}"
        )

    def test_adapters_alone_or_a_refusal(self, tmp_path: Path) -> None:
        """`export_adapters` writes files and names the model they belong to, or says in a UserError why not."""
        model, out = self.described(tmp_path), tmp_path / "adapters"
        out.mkdir()
        try:
            base = model.export_adapters(out, TrainedWeights(model), "fp32")
        except UserError:
            return
        assert isinstance(base, str), f"export_adapters() returned {base!r}, not the name of a model"
        assert base, "export_adapters() returned an empty name of the model that the adapters belong to"
        assert any(out.iterdir()), "export_adapters() wrote nothing"


class TokenizerRules(PluginConformance):
    """Whether `Provider.tokenizer` gives the tokenizer of the data, without the data.

    Attributes:
        texts: what is tokenised; a tokenizer of words needs texts of its words.
    """

    texts: ClassVar[Sequence[str]] = ("the whale swam by", "twice")
    model: ClassVar[Mapping[str, Any]] = {}
    model_plugin: ClassVar[Any]

    def data(self, folder: Path, rank: int = 0, world: int = 1, **facts: Any) -> Data:
        """The data stage of one rank."""
        raise NotImplementedError

    def reread_tokenizer(self, out: Path) -> Mapping[str, Any] | None:
        """The keys of the plugin's section that take the tokenizer saved in a folder; None where there are none."""
        return None

    def tokenizer(self, folder: Path, keys: Mapping[str, Any] | None = None) -> Tokenizer | None:
        """The tokenizer as `forge export` asks for it, with further keys of the section; None when there is none."""
        provider = self.provider()
        if provider.tokenizer is None:
            return None
        ctx = tiny_context(folder, model=self.model, train=self.train, device=self.device)
        ctx.built["comm"] = Comm()
        build_stage(ctx, load_plugin(self.model_plugin), "model", {})
        ctx.plugin = load_plugin(self.plugin).name
        section = provider.config.model_validate({**self.config, **(keys or {})})
        return provider.tokenizer(ctx, section)

    def test_the_tokenizer_is_built_alone(self, tmp_path: Path) -> None:
        """Comm and the described model are all it finds: data, memory and the rest are never built for it."""
        error = refusal(self.tokenizer, tmp_path)
        assert error is None, f"tokenizer(ctx, config) cannot be made without the other stages: {error!r}"

    def test_the_tokenizer_gives_text_back(self, tmp_path: Path) -> None:
        """`encode` gives whole numbers below the vocabulary, and `decode` makes the text of them again."""
        tokenizer = self.tokenizer(tmp_path)
        for text in self.texts if tokenizer is not None else ():
            assert tokenizer is not None
            ids = tokenizer.encode(text)
            assert isinstance(ids, list), f"encode() gave a {type(ids).__name__}, not a list"
            assert ids, f"encode({text!r}) gave no token"
            for token in ids:
                assert type(token) is int, f"encode() gave a {type(token).__name__} among its ids, not an int"
                assert token >= 0, f"encode() gave the id {token}"
            back = tokenizer.decode(ids)
            assert back == text, f"decode(encode({text!r})) is {back!r}"

    def test_the_tokenizer_is_that_of_the_data(self, tmp_path: Path) -> None:
        """Where `Data.encode` and `Data.decode` say something, the tokenizer says the same."""
        tokenizer, data = self.tokenizer(tmp_path), self.data(tmp_path)
        for text in self.texts if tokenizer is not None else ():
            assert tokenizer is not None
            ids, told = tokenizer.encode(text), data.encode(text)
            assert told is None or list(told) == ids, (
                f"the tokenizer encodes {text!r} as {ids}, the data stage as {told}: no special tokens in either"
            )
            assert data.decode(ids) in (None, tokenizer.decode(ids)), (
                f"the data stage decodes {ids} as {data.decode(ids)!r}, the tokenizer otherwise"
            )

    def test_the_tokenizer_saves_its_files(self, tmp_path: Path) -> None:
        """`save` writes whole files, no links, and what reads them again gives the same ids."""
        tokenizer, out = self.tokenizer(tmp_path), tmp_path / "tokenizer"
        if tokenizer is None:
            return
        out.mkdir()
        tokenizer.save(out)
        files = [path for path in out.rglob("*") if not path.is_dir()]
        assert any(path.stat().st_size for path in files), "save() wrote no file"
        links = [path.name for path in files if path.is_symlink()]
        assert not links, f"save() linked {links}: the folder must be whole when it is copied elsewhere"
        keys = self.reread_tokenizer(out)
        again = None if keys is None else self.tokenizer(tmp_path, keys)
        for text in self.texts if again is not None else ():
            assert again is not None
            ids, wanted = again.encode(text), tokenizer.encode(text)
            assert ids == wanted, (
                f"read again, the saved tokenizer encodes {text!r} as {ids}, not as {wanted}"
            )
