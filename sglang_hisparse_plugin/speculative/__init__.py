"""HiSparse under speculative decoding, for releases of SGLang that lack it.

A step proposes a linear chain of draft tokens and verifies them in one forward pass of the target model. While it runs
their KV rows lie in the extra page of the request's buffer (`rows`); after it they are copied to where rows of accepted
tokens belong. The draft model keeps a plain KV pool that is indexed by the same logical slots.
"""
