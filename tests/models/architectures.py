"""Models of `transformers`, tiny and with random weights, each with a mini-batch and its own loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

IGNORED, VOCABULARY, LENGTH, SIDE, CLASSES = -100, 40, 9, 16, 3
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_COUNTED = torch.tensor([9, 2, 5, 1, 7, 0, 3, 9, 4])


@dataclass(frozen=True)
class Architecture:
    """A model of `transformers`, how it is built and what it is trained on.

    Attributes:
        name: How the test calls it.
        model: The class of `transformers`.
        config: Its configuration, without dropout.
        batch: The columns of a mini-batch of so many rows.
        options: Further arguments of the model's forward.
        modes: The modes in which it is exact; BatchNorm is so in eval mode alone.
        prepare: What is done to the fresh model.
    """

    name: str
    model: type[nn.Module]
    config: PretrainedConfig
    batch: Callable[[int], dict[str, Tensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("eval", "train")
    prepare: Callable[[nn.Module], None] = field(default=lambda model: None)

    def build(self, mode: str) -> nn.Module:
        """The model in float64, the same weights each time."""
        torch.manual_seed(5)
        model = self.model(self.config).double().train(mode == "train")
        self.prepare(model)
        return model

    def step(self, model: nn.Module) -> Callable[..., Tensor]:
        """The user's function: the model's own loss."""

        def step(**batch: Tensor) -> Tensor:
            return model(**batch, **self.options).loss

        return step


def _text(rows: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(2, VOCABULARY, (rows, LENGTH)),
        "attention_mask": (torch.arange(LENGTH) < _COUNTED[:rows, None].clamp(min=2)).long(),
    }


def _labelled_text(rows: int) -> dict[str, Tensor]:
    batch = _text(rows)
    is_padding = torch.arange(LENGTH) >= _COUNTED[:rows, None]
    return {**batch, "labels": batch["input_ids"].masked_fill(is_padding, IGNORED)}


def _masked_text(rows: int) -> dict[str, Tensor]:
    batch = _text(rows)
    is_masked = (torch.rand(rows, LENGTH) < torch.linspace(0.6, 0.0, rows)[:, None]) & (
        torch.arange(LENGTH) < _COUNTED[:rows, None]
    )
    labels = batch["input_ids"].masked_fill(~is_masked, IGNORED)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_masked, 1), "labels": labels}


def _classified_text(rows: int) -> dict[str, Tensor]:
    return {**_text(rows), "labels": torch.arange(rows) % CLASSES}


def _scored_text(rows: int) -> dict[str, Tensor]:
    return {**_text(rows), "labels": torch.randn(rows, dtype=torch.float64)}


def _tagged_text(rows: int) -> dict[str, Tensor]:
    return {**_text(rows), "labels": torch.randint(0, 2, (rows, CLASSES)).double()}


def _answered_text(rows: int) -> dict[str, Tensor]:
    start = torch.arange(rows) % 4
    return {**_text(rows), "start_positions": start, "end_positions": start + 1}


def _translated_text(rows: int) -> dict[str, Tensor]:
    labels = torch.randint(2, VOCABULARY, (rows, 6))
    return {**_text(rows), "labels": labels.masked_fill(torch.arange(6) >= _COUNTED[:rows, None], IGNORED)}


def _pixels(rows: int) -> Tensor:
    return torch.randn(rows, 3, SIDE, SIDE, dtype=torch.float64)


def _classified_images(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": _pixels(rows), "labels": torch.arange(rows) % CLASSES}


def _segmented_images(rows: int) -> dict[str, Tensor]:
    is_ignored = torch.rand(rows, SIDE, SIDE) < torch.linspace(0, 1, rows)[:, None, None]
    return {
        "pixel_values": _pixels(rows),
        "labels": torch.randint(0, CLASSES, (rows, SIDE, SIDE)).masked_fill(is_ignored, 255),
    }


def _captioned_images(rows: int) -> dict[str, Tensor]:
    return {**_text(rows), "pixel_values": _pixels(rows)}


def _spoken_text(rows: int) -> dict[str, Tensor]:
    samples = 400
    heard = 200 + 20 * (torch.arange(rows) % 9)
    labels = torch.randint(1, 12, (rows, 4))
    return {
        "input_values": torch.randn(rows, samples, dtype=torch.float64),
        "attention_mask": (torch.arange(samples) < heard[:, None]).long(),
        "labels": labels.masked_fill(torch.arange(4) >= 1 + torch.arange(rows)[:, None] % 4, IGNORED),
    }


_GPT2 = transformers.GPT2Config(
    vocab_size=VOCABULARY,
    n_positions=16,
    n_embd=16,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)


def _bert(**options: Any) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SMALL,
        **options,
    )


_T5 = transformers.T5Config(
    vocab_size=VOCABULARY,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=2,
    num_heads=2,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
_LLAMA = transformers.LlamaConfig(
    vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=16, **SMALL
)


def _mixtral(**options: Any) -> transformers.MixtralConfig:
    return transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        num_key_value_heads=1,
        max_position_embeddings=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.0,
        experts_implementation="eager",
        **SMALL,
        **options,
    )


_RESNET = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES
)
_VIT = transformers.ViTConfig(
    image_size=SIDE,
    patch_size=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    num_labels=CLASSES,
    **SMALL,
)
_SEGFORMER = transformers.SegformerConfig(
    num_encoder_blocks=2,
    depths=[1, 1],
    sr_ratios=[2, 1],
    hidden_sizes=[8, 16],
    patch_sizes=[3, 3],
    strides=[2, 2],
    num_attention_heads=[1, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=8,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    classifier_dropout_prob=0.0,
    drop_path_rate=0.0,
    num_labels=CLASSES,
    semantic_loss_ignore_index=255,
)
_CLIP = transformers.CLIPConfig(
    text_config={"vocab_size": VOCABULARY, "max_position_embeddings": 16, **SMALL},
    vision_config={"image_size": SIDE, "patch_size": 8, **SMALL},
    projection_dim=8,
)


def _wav2vec2(reduction: str) -> transformers.Wav2Vec2Config:
    return transformers.Wav2Vec2Config(
        vocab_size=12,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        activation_dropout=0.0,
        attention_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction=reduction,
        ctc_zero_infinity=True,
        **SMALL,
    )


EXACT = [
    Architecture("gpt2", transformers.GPT2LMHeadModel, _GPT2, _labelled_text),
    Architecture(
        "gpt2, checkpointed",
        transformers.GPT2LMHeadModel,
        _GPT2,
        _labelled_text,
        modes=("train",),
        prepare=lambda model: model.activation_checkpointing_enable({"use_reentrant": False}),
    ),
    Architecture(
        "gpt2, classification",
        transformers.GPT2ForSequenceClassification,
        transformers.GPT2Config(**{**_GPT2.to_diff_dict(), "num_labels": CLASSES, "pad_token_id": 1}),
        _classified_text,
    ),
    Architecture("bert, masked", transformers.BertForMaskedLM, _bert(), _masked_text),
    Architecture(
        "bert, classification",
        transformers.BertForSequenceClassification,
        _bert(num_labels=CLASSES),
        _classified_text,
    ),
    Architecture(
        "bert, regression", transformers.BertForSequenceClassification, _bert(num_labels=1), _scored_text
    ),
    Architecture(
        "bert, several labels",
        transformers.BertForSequenceClassification,
        _bert(num_labels=CLASSES, problem_type="multi_label_classification"),
        _tagged_text,
    ),
    Architecture("bert, answers", transformers.BertForQuestionAnswering, _bert(), _answered_text),
    Architecture("t5", transformers.T5ForConditionalGeneration, _T5, _translated_text),
    Architecture("llama", transformers.LlamaForCausalLM, _LLAMA, _labelled_text),
    Architecture("mixtral", transformers.MixtralForCausalLM, _mixtral(), _labelled_text),
    Architecture(
        "resnet", transformers.ResNetForImageClassification, _RESNET, _classified_images, modes=("eval",)
    ),
    Architecture("vit", transformers.ViTForImageClassification, _VIT, _classified_images),
    Architecture(
        "segformer",
        transformers.SegformerForSemanticSegmentation,
        _SEGFORMER,
        _segmented_images,
        modes=("eval",),
    ),
    Architecture("wav2vec2, ctc sum", transformers.Wav2Vec2ForCTC, _wav2vec2("sum"), _spoken_text),
    Architecture("wav2vec2, ctc mean", transformers.Wav2Vec2ForCTC, _wav2vec2("mean"), _spoken_text),
]

COUNTED = Architecture("gpt2, num_items_in_batch", transformers.GPT2LMHeadModel, _GPT2, _labelled_text)

REFUSED = [
    Architecture(
        "mixtral, balance loss",
        transformers.MixtralForCausalLM,
        _mixtral(output_router_logits=True, router_aux_loss_coef=0.1),
        _labelled_text,
    ),
    Architecture("clip", transformers.CLIPModel, _CLIP, _captioned_images, options={"return_loss": True}),
]
