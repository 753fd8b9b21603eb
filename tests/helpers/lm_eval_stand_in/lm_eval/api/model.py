"""TemplateLM: tokenizes (context, continuation) and passes tokens on."""


class CacheHook:
    def add_partial(self, attr, req, res):
        pass


class TemplateLM:
    def __init__(self):
        self.cache_hook = CacheHook()

    def loglikelihood(self, requests, **options):
        rows = []
        for context, continuation in (r.args for r in requests):
            if context:
                spaces = len(context) - len(context.rstrip())
                continuation, context = (
                    context[len(context) - spaces :] + continuation,
                    context.rstrip(),
                )
                head = self.tok_encode(context)
                tail = self.tok_encode(context + continuation)[len(head) :]
            else:
                head, tail = (
                    [self.prefix_token_id],
                    self.tok_encode(continuation, add_special_tokens=False),
                )
            rows.append(((context, continuation), head, tail))
        return self._loglikelihood_tokens(rows, **options)
