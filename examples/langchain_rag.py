"""An unchanged LangChain chain behind the gateway: documents in one message, found again in whatever order they come.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/langchain_rag.py

Start the gateway first, with a policy whose `reuse` has the mode `blend`: promptsluice serve --config
examples/policies/recognise.yaml. Needs langchain-openai.
"""

import os
from collections.abc import Sequence

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

MODEL = os.environ.get("MODEL", "smollm2-135m-instruct")
PAGES = {
    "harbour": "The harbour of Valmy has three piers. The oldest was built in 1843 from granite that came by ship. ",
    "railway": "The railway from Valmy to the capital runs twice a day. A ticket costs nine crowns on board. ",
    "museum": "The museum of salt is closed on Mondays. Its director collects maps of the sea. ",
}
PROMPT = ChatPromptTemplate.from_messages(
    [("user", "Use these documents to answer.\n\n{context}\n\nQuestion: {question}\nAnswer briefly.")]
)


def ask(names: Sequence[str], question: str) -> None:
    """One question over some pages, and how many of its tokens were known already."""
    chain = PROMPT | ChatOpenAI(model=MODEL, temperature=0, max_completion_tokens=32)
    answer = chain.invoke({"context": "\n\n".join(PAGES[name] * 6 for name in names), "question": question})
    usage = answer.response_metadata["token_usage"]
    print(f"{question} {answer.text.strip()}")
    print(f"prompt tokens: {usage['prompt_tokens']}, of them cached: {usage['prompt_tokens_details']['cached_tokens']}")


def main() -> None:
    ask(["harbour", "railway", "museum"], "How many piers are there?")
    ask(["museum", "harbour", "railway"], "On which day is the museum closed?")


if __name__ == "__main__":
    main()
