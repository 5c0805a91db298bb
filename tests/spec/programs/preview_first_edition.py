from sharpen import Dataset

Dataset(path="my_dataset", split="train").preview()

# Output:
# {
#   "question": [
#     "What is 2 + 2?",
#     "What is 4 + 4?"
#   ],
#   "answer": [
#     "4",
#     "8"
#   ]
# }
