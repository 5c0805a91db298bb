"""Is the judge right? Its owner's marks on some dozens of answers, compared with what it says of them.

In: marks, a judge. Out: agreement, error rates and scatter, with intervals; a success rate corrected for its errors.

- `marks`: the file of marks, and the answers of a run to be marked
- `asking`: asks a judge for each marked answer, several times if told so
- `agreement`: the numbers, and the lines that say them
"""
