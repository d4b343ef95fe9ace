"""What makes an answer good. config.yaml names the functions: `reward_funcs: [rewards.near_length]`."""

WANTED = 80  # characters


def near_length(completions, **columns):
    """One number for each answer, the higher the better.

    completions: the answers, each a text, or a list of one message where the prompts are lists of messages.
    columns: the other columns of the data by their names, as long lists as `completions`.
    """
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [-abs(WANTED - len(text)) / WANTED for text in texts]
