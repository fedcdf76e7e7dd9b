"""Sixty usual words of Lightning, transformers and Accelerate, and ours for them.

Looked up only for names that are unknown anyway: keys of a run file, arguments of a trainer, names of this package.
"""

_WORDS = (
    # key of a run file, argument of a trainer, words of others
    ("train.epochs", "epochs=…", "max_epochs num_train_epochs"),
    ("train.updates", "updates=…", "max_steps max_train_steps"),
    ("train.clip_norm", "train=Training(clip_norm=…)", "gradient_clip_val max_grad_norm"),
    ("train.precision", 'precision="bf16-mixed"', "mixed_precision fp16 bf16"),
    ("train.compile", 'train=Training(compile="model")', "torch_compile"),
    ("train.memory.checkpoint", 'train=Training(memory=Memory(checkpoint="blocks"))', "gradient_checkpointing"),
    ("parallel.strategy", 'strategy="ddp"', "devices num_nodes num_processes fsdp deepspeed"),
    ("device", 'device="cpu"', "accelerator"),
    ("data.train", "data=MapData(…)", "train_dataloaders train_dataloader train_dataset datamodule"),
    ("data.evaluations", "evaluations=MapData(…)", "val_dataloaders eval_dataset eval_dataloader"),
    ("data.global_batch_size", "data=MapData(…, global_batch_size=…)", "batch_size train_batch_size"),
    (
        "data.micro_batch_size",
        "data=MapData(…, micro_batch_size=…)",
        "accumulate_grad_batches gradient_accumulation_steps per_device_train_batch_size",
    ),
    ("data.num_workers", "data=MapData(…, num_workers=…)", "dataloader_num_workers"),
    ("hooks", "hooks=[…]", "callbacks"),
    ("log.writers", "log=Logging(writers=…)", "logger report_to"),
    ("log.every_updates", "log=Logging(every_updates=…)", "log_every_n_steps logging_steps"),
    ("checkpoint.every_updates", "checkpoint=Checkpointing(every_updates=…)", "save_steps"),
    ("checkpoint.keep_last", "checkpoint=Checkpointing(keep_last=…)", "save_total_limit"),
    ("evaluation.every_updates", "evaluation=Evaluation(every_updates=…)", "val_check_interval eval_steps"),
    ("evaluation.every_epochs", "evaluation=Evaluation(every_epochs=…)", "check_val_every_n_epoch"),
    ("name", "folder=…", "default_root_dir output_dir"),
    ("lr_schedule", 'lr_schedule={"kind": "cosine", "warmup_updates": 100}', "lr_scheduler lr_scheduler_type"),
    ("lr_schedule.warmup_updates", 'lr_schedule={"kind": "cosine", "warmup_updates": 100}', "warmup_steps"),
    ("optimizer.lr", "optimizer=torch.optim.AdamW(model.parameters(), lr=…)", "learning_rate lr"),
    ("optimizer.args.weight_decay", "optimizer=torch.optim.AdamW(…, weight_decay=…)", "weight_decay"),
    ("task", "task=…", "loss_fn criterion compute_metrics"),
    ("resume", "trainer.resume(…)", "ckpt_path resume_from_checkpoint"),
)
_NAMES = {
    "Accelerator": "Engine",
    "Callback": "Hook",
    "EarlyStopping": "EarlyStop",
    "Fabric": "Engine",
    "LightningModule": "integrations.lightning",
    "ModelCheckpoint": "Checkpointing",
    "TrainingArguments": "Training",
}

KEYS = {word: key for key, _, words in _WORDS for word in words.split()}
"""Our key of a run file for each word."""

ARGUMENTS = {word: argument for _, argument, words in _WORDS for word in words.split()}
"""Our argument of a trainer for each word, as Python writes it."""

VALUES = {"fp16": "16-mixed", "fp32": "32-true", "fp8": "float8-mixed", "deepspeed": "fsdp", "zero3": "fsdp"}
"""Our names for number formats and strategies."""


def name_for(word: str) -> str:
    """End of a sentence about a name that this package has not."""
    return f"; here it is `evenstep.{_NAMES[word]}`" if word in _NAMES else ""
