MODELS = {}


def register_model(name):
    def register(kind):
        MODELS[name] = kind
        return kind

    return register


def get_model(name):
    return MODELS[name]
