"""Transformers with a regression head, plain and adapted."""

import torch

from tests.foreign.specimen import Given, specimen, thirds

TOKENS = 50


def texts(label="labels", rows=8, length=6, batches=16):
    """Batches as a collator makes them: token numbers, masks and labels."""
    from transformers import BatchEncoding

    found = []
    for _ in range(batches):
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[: rows // 2, length - 2 :] = 0
        tokens = torch.randint(1, TOKENS, (rows, length)) * mask
        target = torch.randn(rows, 1, dtype=torch.float64)
        found.append(BatchEncoding({"input_ids": tokens, "attention_mask": mask, label: target}))
    return found


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=1,
    )
    return BertForSequenceClassification(config).double()


def logits(model, batch):
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits


@specimen("transformers", "BertForSequenceClassification", "rg.LastLayerRigidity(model)")
def encoder():
    head = ["classifier.weight", "classifier.bias"]
    return Given(bert(), **thirds(texts()), readout=head, output=logits)


@specimen(
    "transformers",
    "the same, the target under `label` as in many data sets",
    "rg.LastLayerRigidity(model)",
)
def encoder_label():
    head = ["classifier.weight", "classifier.bias"]
    return Given(bert(), **thirds(texts("label")), readout=head, output=logits)


@specimen(
    "transformers", "LlamaForSequenceClassification (last token)", "rg.LastLayerRigidity(model)"
)
def decoder():
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=1,
        pad_token_id=0,
    )
    model = LlamaForSequenceClassification(config).double()
    return Given(model, **thirds(texts()), readout=["score.weight"], output=logits)


@specimen(
    "transformers",
    "PatchTSTForPrediction",
    'rg.LastLayerRigidity(model, output="prediction_outputs", target=lambda b: b["future_values"])',
)
def patch_forecaster():
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=16,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        d_model=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        loss="mse",
    )
    model = PatchTSTForPrediction(config).double()
    batches = [
        {
            "past_values": torch.randn(6, 16, 2, dtype=torch.float64),
            "future_values": torch.randn(6, 4, 2, dtype=torch.float64),
        }
        for _ in range(16)
    ]
    return Given(
        model,
        **thirds(batches),
        readout=["head.projection.weight", "head.projection.bias"],
        output=lambda m, b: m(b["past_values"]).prediction_outputs,
        targets=-2,
    )


@specimen("peft", "LoRA beside the head", "rg.LastLayerRigidity(model)")
def adapter_beside():
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["query", "value"], r=2)
    model = get_peft_model(bert(), config).double()
    head = "base_model.model.classifier.modules_to_save.default"
    names = [f"{head}.weight", f"{head}.bias"]
    return Given(model, **thirds(texts()), readout=names, output=logits)


@specimen("peft", "LoRA on the head", "rg.LastLayerRigidity(model)")
def adapter_on_head():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["classifier"], r=2, init_lora_weights=False)
    model = get_peft_model(bert(), config).double()
    head = "base_model.model.classifier"
    names = [f"{head}.base_layer.weight", f"{head}.base_layer.bias"]
    names += [f"{head}.lora_B.default.weight"]
    return Given(model, **thirds(texts()), readout=names, output=logits)


@specimen(
    "x-transformers",
    "ContinuousTransformerWrapper",
    "rg.LastLayerRigidity(model)",
)
def continuous():
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=16, depth=1, heads=2, attn_dim_head=8)
    model = ContinuousTransformerWrapper(dim_in=3, dim_out=2, max_seq_len=6, attn_layers=layers)
    batches = [
        (torch.randn(6, 6, 3, dtype=torch.float64), torch.randn(6, 6, 2, dtype=torch.float64))
        for _ in range(16)
    ]
    return Given(
        model.double(),
        **thirds(batches),
        readout=["project_out.weight"],
        output=lambda m, b: m(b[0]),
    )
