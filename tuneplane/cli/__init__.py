"""`tp`: parse, call, print. One file a noun; nothing is decided here."""
