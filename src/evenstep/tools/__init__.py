"""Commands beside training: `prove`, `report`, `plan`. The core imports none of them."""
