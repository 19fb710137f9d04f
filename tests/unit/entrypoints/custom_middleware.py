"""Two middlewares that `--middleware` can name."""


class Stamp:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def stamped(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-class", b"yes")]
            await send(message)

        await self.app(scope, receive, stamped)


async def stamp(request, call_next):
    response = await call_next(request)
    response.headers["x-function"] = "yes"
    return response
