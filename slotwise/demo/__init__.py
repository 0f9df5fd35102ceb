"""The demonstration: a real small model turned into mixture-of-experts files, and its story."""
