"""Windows of a long text: each token is predicted once, with `context_len` tokens of context at least."""


def get_rolling_token_windows(token_list, prefix_token, max_seq_len, context_len):
    first = token_list[:max_seq_len]
    yield [prefix_token, *first[:-1]], first
    done, step = len(first), max_seq_len - context_len + 1
    while done < len(token_list):
        end = min(len(token_list), done + step)
        yield token_list[end - max_seq_len - 1 : end - 1], token_list[done:end]
        done = end


def make_disjoint_window(pair):
    context, target = pair
    return context[: len(context) - (len(target) - 1)], target
