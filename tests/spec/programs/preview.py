from sharpen import DatasetConfig
DatasetConfig(path="my_dataset", split="train").preview()
# Output:
# [
#   {
#     "question": "What is 2 + 2?",
#     "answer": "4"
#   },
#   {
#     "question": "What is 4 + 4?",
#     "answer": "8"
#   }
# ]
