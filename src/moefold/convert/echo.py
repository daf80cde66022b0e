"""The tensors of a Hugging Face folder that repeat another one: which, and of which. Torch-free."""

from moefold.config.schema import ModelConfig

HEAD_NAME, EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
"""The names that all families have for them."""
DUPLICATE_REASONS = {EMBEDDING_NAME: "the embedding again", HEAD_NAME: "the head again"}
"""Why an echo is passed over, by what it repeats."""


def find_duplicate_tensors(model: ModelConfig) -> dict[str, str]:
    """The tensors that a folder of a model may hold beside those of the model, each with the one that it must equal.

    The head of tied embeddings, and the embedding and the head of each layer of multi-token prediction: the published
    folder of DeepSeek-V3 has both, transformers reads neither.
    """
    head = EMBEDDING_NAME if model.tie_embeddings else HEAD_NAME
    echoes = {HEAD_NAME: EMBEDDING_NAME} if model.tie_embeddings else {}
    for number in range(model.num_layers, model.num_layers + model.mtp_layers):
        echoes[f"model.layers.{number}.embed_tokens.weight"] = EMBEDDING_NAME
        echoes[f"model.layers.{number}.shared_head.head.weight"] = head
    return echoes
