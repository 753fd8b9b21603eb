"""lm-eval registers its own models here."""
