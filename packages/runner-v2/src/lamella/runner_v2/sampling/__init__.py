"""Choosing tokens: rows of logits in, token ids out. What each step means, exactly:

Rows. A sequence that checks K drafts has K + 1 logits rows; drafts before a row count as output at that row.

Edits change logits in place, on rows that ask for them only, in this order:
    mask               tokens whose bit is 0 become -inf
    allowed ids        all other tokens become -inf
    logit bias         is added (to allowed ids too); entries of one id add up
    min tokens         stop ids become -inf where the row chooses output token number < min_tokens (from 0)
    penalties          over prompt, output and drafts: x > 0 ? x / repetition : x * repetition; then, over output and
                       drafts only, minus frequency * count, minus presence; float32, in this order
    bad words          the last id of a word becomes -inf where the ids before it end the output and drafts (the prompt
                       does not count)

Choice. Tokens are ordered by logit, larger first, and by id, lower first, where logits are equal. T is the temperature.
    greedy             (T < 1e-5) the first token
    min-p              keeps x >= x_first + T * log(min_p)
    top-k              keeps exactly the first k; k >= vocabulary is off
    top-p              keeps the shortest prefix of what is left whose mass exp((x - x_first) / T) reaches p of the mass
                       of what is left; at least one token. Masses are rounded to 2^-s of the first one's (2^-37 for
                       50,000 tokens), so that every path adds them up exactly
    noise              argmax(x / T + G) in float64 over what is left, G = Gumbel noise of (seed, position, token id):
                       an exact draw, without renormalising. The lower id wins a tie
    So an id depends on the row's logits, parameters and position alone: not on the batch, the row's place in it, the
    number of drafts, or on which kernels run.

Temperature is never divided into the logits: at any T their order is the same, and no quotient overflows.

Logprobs are log-softmax of the raw logits, before any edit. The rank of a token is the number of logits >= its own.

Failures. A row whose edited logits have NaN, +inf or nothing above -inf has no token: its status says so, its id is 0,
and the other rows are not affected. So is a row that wants logprobs and whose raw logits have NaN.

Only params.py is meant for those who do not have torch.
"""
