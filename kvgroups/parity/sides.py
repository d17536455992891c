"""The two ways through one model, behind one interface: eager Hugging Face, and kvgroups."""

from __future__ import annotations

import gc
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvgroups.cache import GroupedCache
from kvgroups.parity.row import Generated, Row
from kvgroups.patching import Patch


class Side:
    """Runs a model one way, and notes the most bytes that its caches held and what else is worth counting.

    Args:
        model: the model, whose `generation_config` decides nothing.
        filler: token id to pad with.
    """

    def __init__(self, model: PreTrainedModel, filler: int) -> None:
        self.model = model
        self.filler = filler
        self.parameters = set(inspect.signature(type(model).forward).parameters)
        self.counts: Counter[str] = Counter()
        """What beams and drafts cost since `running` was entered last."""
        self.refusal: str | None = None
        """Why drafts were refused since then."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be the way that the model goes while inside, and count from zero."""
        self.counts.clear()
        self.refusal = None
        yield

    @property
    def kv_bytes(self) -> int:
        """The most bytes that caches held since `running` was entered last."""
        raise NotImplementedError

    def new_cache(self) -> Any:
        """A cache for a loop by hand; None for the one that the model makes itself."""
        raise NotImplementedError

    def saw_cache(self, cache: Any) -> None:
        """Note a cache when it is at its largest."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        *,
        width: int = 0,
        previous: Generated | None = None,
        **options: Any,
    ) -> Generated:
        """`model.generate` on a left-padded batch.

        Args:
            prompts: rows of token ids; with `previous`, what each row adds to it, all of one length.
            num_new: tokens to answer, exactly.
            width: columns to pad to at least.
            previous: an earlier turn whose cache is used on.
            **options: more arguments of `generate`.
        """
        ids, mask = self._batch(prompts, max(width, *map(len, prompts)), left=True)
        if previous is not None:
            answered = previous.sequences.shape[1] - previous.mask.shape[1]
            past = torch.cat([previous.mask, torch.ones_like(previous.sequences[:, :answered])], dim=1)
            ids, mask = torch.cat([previous.sequences, ids], dim=1), torch.cat([past, mask], dim=1)
            options["cache"] = previous.cache
        output = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_new,
            return_dict_in_generate=True,
            output_logits=True,
            **{"do_sample": False, "use_cache": True, **options},
        )
        if output.cache is not None:
            self.saw_cache(output.cache)
        logits = torch.stack(output.logits, dim=1)
        beam_indices = getattr(output, "beam_indices", None)
        if beam_indices is not None:  # beams wander: row beam_indices[beam, t] held a beam at its token t
            logits = logits[beam_indices, torch.arange(num_new, device=logits.device)]
        scores = getattr(output, "sequences_scores", None)
        mask = mask.repeat_interleave(len(output.sequences) // len(mask), dim=0)
        asked = output.sequences[:, : ids.shape[1]]
        answers = output.sequences[:, ids.shape[1] :].tolist()
        rows = []
        for index, answer in enumerate(answers):
            prompt = tuple(asked[index][mask[index].bool()].tolist())
            pieces: tuple[int, ...] = (len(prompt),)
            if previous is not None:  # the last token of an answer is fed with what comes after it
                before = previous.rows[index]
                fed = len(before.prompt) + len(before.answer) - 1
                pieces = (*before.pieces, *(1 for _ in before.answer[1:]), len(prompt) - fed)
            score = None if scores is None else scores[index].item()
            rows.append(Row(prompt, tuple(answer), logits[index], pieces, score))
        return Generated(rows, output.sequences, mask, output.cache)

    def beams(
        self, prompts: Sequence[Sequence[int]], num_new: int, num_beams: int, *, use_cache: bool = True
    ) -> list[Row]:
        """Beam search on a left-padded batch: all beams of each prompt, the best first.

        Counts `reorders`, the steps after which the cache is asked to follow the beams, and `swaps`, those of
        them at which a beam really goes on from another row.
        """

        def follow(cache: Any, beam_idx: torch.Tensor) -> Any:
            self.counts["reorders"] += 1
            self.counts["swaps"] += beam_idx.tolist() != [*range(len(beam_idx))]
            self.reorder(cache, beam_idx)
            return cache

        # `generate` asks the model's `_reorder_cache` if it has one, and the cache otherwise.
        self.model.__dict__["_reorder_cache"] = follow
        try:
            return self.generate(
                prompts,
                num_new,
                num_beams=num_beams,
                num_return_sequences=num_beams,
                output_scores=True,
                use_cache=use_cache,
            ).rows
        finally:
            del self.model.__dict__["_reorder_cache"]

    def reorder(self, cache: Any, beam_idx: torch.Tensor) -> None:
        """Have the rows of a cache follow the beams."""
        cache.reorder_cache(beam_idx)

    def speculate(self, prompt: Sequence[int], num_new: int, num_drafted: int) -> list[Row]:
        """Greedy search that verifies drafts, looked up in the prompt, several in one forward.

        Counts `forwards`, and `drafted` tokens. Where drafts are refused, `refusal` says why.
        """
        fed: list[int] = []

        def watch(_: Any, args: Any, inputs: dict[str, Any]) -> None:
            fed.append(inputs["input_ids"].shape[1])

        hook = self.model.register_forward_pre_hook(watch, with_kwargs=True)
        try:
            rows = self.generate([prompt], num_new, prompt_lookup_num_tokens=num_drafted).rows
            # Each forward is fed its drafts and what is known: the prompt at first, then the newest token.
            self.counts["forwards"] = len(fed)
            self.counts["drafted"] = sum(fed) - len(prompt) - (len(fed) - 1)
            return rows
        finally:
            hook.remove()

    @torch.no_grad()
    def decode_by_hand(self, prompts: Sequence[Sequence[int]], num_new: int) -> list[Row]:
        """Prefill a right-padded batch through `model(...)`, then decode from each row's last real token."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.model.device)
        ids, mask = self._batch(prompts, int(lengths.max()), left=False)
        cache = self.new_cache()
        output = self._forward(cache, input_ids=ids, attention_mask=mask)
        logits = [output.logits[torch.arange(len(prompts), device=ids.device), lengths - 1].float()]
        tokens = [logits[-1].argmax(-1)]
        while len(tokens) < num_new:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            inputs = {"input_ids": tokens[-1][:, None], "attention_mask": mask}
            if "position_ids" in self.parameters:
                inputs["position_ids"] = (lengths + len(tokens) - 1)[:, None]
            output = self._forward(output.cache, **inputs)
            logits.append(output.logits[:, -1].float())
            tokens.append(logits[-1].argmax(-1))
        self.saw_cache(output.cache)
        answers, steps = torch.stack(tokens, dim=1).tolist(), torch.stack(logits, dim=1)
        return [
            Row(tuple(prompt), tuple(answers[row]), steps[row], (len(prompt),))
            for row, prompt in enumerate(prompts)
        ]

    def _forward(self, cache: Any, **inputs: Any) -> Any:
        if cache is not None:
            inputs["cache"] = cache
        return self.model(**inputs, use_cache=True, return_dict=True)

    def _batch(
        self, prompts: Sequence[Sequence[int]], width: int, *, left: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(prompts), width), self.filler)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            columns = slice(width - len(prompt), width) if left else slice(0, len(prompt))
            ids[row, columns] = torch.tensor(prompt)
            mask[row, columns] = 1
        return ids.to(self.model.device), mask.to(self.model.device)


class EagerSide(Side):
    """The model as Hugging Face runs it, with the cache that it makes itself."""

    @contextmanager
    def running(self) -> Iterator[None]:
        self._kv_bytes = 0
        with super().running():
            yield

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes

    def new_cache(self) -> Any:
        return None

    def saw_cache(self, cache: Any) -> None:
        self._kv_bytes = max(self._kv_bytes, cache_bytes(cache))

    def reorder(self, cache: Any, beam_idx: torch.Tensor) -> None:
        """The same, counting `copied_bytes`: transformers gathers every tensor anew, moved or not."""
        super().reorder(cache, beam_idx)
        self.counts["copied_bytes"] += cache_bytes(cache)

    def speculate(self, prompt: Sequence[int], num_new: int, num_drafted: int) -> list[Row]:
        """The same, or plain greedy search where transformers refuses drafts, as it does for states."""
        try:
            return super().speculate(prompt, num_new, num_drafted)
        except ValueError as error:
            self.refusal = str(error)
            return self.generate([prompt], num_new).rows


class PagedSide(Side):
    """The model on block tables.

    Args:
        model: the model, not patched.
        filler: token id to pad with.
        patch: puts the model on block tables and takes it off.
    """

    def __init__(self, model: PreTrainedModel, filler: int, patch: Patch) -> None:
        super().__init__(model, filler)
        self.patch = patch
        self.manager = patch.context.manager

    @contextmanager
    def running(self) -> Iterator[None]:
        self.manager.reset_peak()
        self.patch.install()
        try:
            with super().running():
                yield
        finally:
            self.patch.remove()

    @property
    def kv_bytes(self) -> int:
        return self.manager.usage().peak_held_bytes

    def new_cache(self) -> GroupedCache:
        return GroupedCache(self.model)

    def beams(
        self, prompts: Sequence[Sequence[int]], num_new: int, num_beams: int, *, use_cache: bool = True
    ) -> list[Row]:
        """The same, counting `copied_bytes`: partial blocks and states of beams that part."""
        before = self.manager.usage().copied_bytes
        rows = super().beams(prompts, num_new, num_beams, use_cache=use_cache)
        self.counts["copied_bytes"] += self.manager.usage().copied_bytes - before
        return rows

    def speculate(self, prompt: Sequence[int], num_new: int, num_drafted: int) -> list[Row]:
        """The same, or no rows where a state layer that is not fused cannot take tokens back."""
        try:
            return super().speculate(prompt, num_new, num_drafted)
        except ValueError as error:
            if not self.patch.context.splits_rows:
                raise
            self.refusal = str(error)
            return []

    def held_bytes(self) -> int:
        """Bytes that are still held, once caches that nobody refers to are gone."""
        if self.manager.usage().held_bytes:
            gc.collect()
        return self.manager.usage().held_bytes


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a transformers cache: keys, values and states, padding included.

    Counted by what a tensor spans, not by what its storage keeps alive: a window that is a slice of a longer
    tensor counts as the slice.
    """
    seen: dict[int, torch.Tensor] = {}
    waiting = [vars(layer) for layer in cache.layers]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            seen[id(value)] = value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return sum(tensor.numel() * tensor.element_size() for tensor in seen.values())
