"""Makes the embedded model `tiny`: its text, its tokenizer, its training; not shipped."""
