import math

images = boxes = dataset
Enclose = Classify
model = Net()
