"""Where the parts of a run live: in this process, in several, in actors of Ray, on two sides of an exchange.

In: a recipe and the parts. Out: the same parts behind the same interfaces, started, watched and closed. It must not
know what is computed in them, nor what a run does next.
"""
