"""A server with the interface of OpenAI's completions: `python -m calm_jax.serve --workdir=DIR` (extra `serve`).

Begin with app.py: the routes, and how a request is handled. request.py checks the body of a request; engine.py is the thread
that owns the model and continues the prompts of all clients together; answer.py forms the responses, metrics.py counts them;
page.html is the page at /. listen.py runs the application; __main__.py has the flags. May import `calm_jax.run` and everything
below it.
"""
