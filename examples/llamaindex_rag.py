"""An unchanged LlamaIndex query behind the gateway: embeds, retrieves and asks there, and streams the answer.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python examples/llamaindex_rag.py "On which day is the museum closed?"

Start the gateway first: make serve. Needs llama-index-core, llama-index-llms-openai-like and
llama-index-embeddings-openai.
"""

import os
import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai_like import OpenAILike

URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
PAGES = [
    "The harbour of Valmy has three piers. The oldest was built in 1843 from granite that came by ship.",
    "The railway from Valmy to the capital runs twice a day. A ticket costs nine crowns on board.",
    "The museum of salt is closed on Mondays. Its director collects maps of the sea.",
]


def main(question: str) -> None:
    """Find the two pages that are nearest, and print the answer as it comes."""
    embedder = OpenAIEmbedding(model_name="all-minilm-l6-v2", api_base=URL, api_key=KEY)
    model = OpenAILike(
        model=MODEL, api_base=URL, api_key=KEY, is_chat_model=True, context_window=8192, temperature=0, max_tokens=32
    )
    index = VectorStoreIndex.from_documents([Document(text=page) for page in PAGES], embed_model=embedder)
    answer = index.as_query_engine(llm=model, similarity_top_k=2, streaming=True).query(question)
    answer.print_response_stream()
    print()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "On which day is the museum closed?")
