"""`LoopBridge` delivers events of several threads to the event loop, in order and with few wake-ups."""

import asyncio
import threading

from jlora.serve.engine.request import Piece
from jlora.serve.http.service import LoopBridge


def test_events_of_each_thread_arrive_in_order():
    threads, each = 4, 5000

    async def listen():
        loop = asyncio.get_running_loop()
        bridge, heard, done = LoopBridge(loop), {i: [] for i in range(threads)}, asyncio.Event()
        wakes = 0
        wake = loop.call_soon_threadsafe

        def counted(*args):
            nonlocal wakes
            wakes += 1
            return wake(*args)

        loop.call_soon_threadsafe = counted

        def deliver(i, event):
            heard[i].append(event.tokens[0])
            if sum(map(len, heard.values())) == threads * each:
                done.set()

        def speak(i):
            for n in range(each):
                bridge.post(lambda event: deliver(i, event), Piece("", (n,)))

        speakers = [threading.Thread(target=speak, args=(i,)) for i in range(threads)]
        for speaker in speakers:
            speaker.start()
        await asyncio.wait_for(done.wait(), 30)
        for speaker in speakers:
            speaker.join()
        return heard, wakes

    heard, wakes = asyncio.run(listen())
    assert all(tokens == list(range(each)) for tokens in heard.values())
    assert wakes < threads * each / 2


def test_events_after_the_loop_is_closed_are_dropped():
    loop = asyncio.new_event_loop()
    bridge = LoopBridge(loop)
    loop.close()
    bridge.post(lambda event: None, Piece("", ()))
