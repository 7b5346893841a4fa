"""One-shot answers: each question gets its own, and nobody waits for ever for somebody else's."""

from __future__ import annotations

import trio

from gpuactors.concurrency.replies import Replies


async def test_each_question_gets_its_own_answer() -> None:
    replies: Replies[str] = Replies()
    with trio.fail_after(1), replies.ask() as first, replies.ask() as second:
        assert first.token != second.token
        assert replies.reply(second.token, "two")
        assert replies.reply(first.token, "one")
        assert (await first.answer(), await second.answer()) == ("one", "two")


async def test_only_the_first_answer_counts() -> None:
    replies: Replies[str] = Replies()
    with trio.fail_after(1), replies.ask() as question:
        replies.reply(question.token, "one")
        replies.reply(question.token, "two")
        assert await question.answer() == "one"


async def test_an_answer_to_somebody_who_has_gone_is_dropped() -> None:
    replies: Replies[str] = Replies()
    with replies.ask() as question:
        pass
    assert not replies.reply(question.token, "late")
    assert not replies.reply(999, "nobody asked")
