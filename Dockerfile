# docker build -t staticmem .
# docker run --rm -v "$PWD:/models" staticmem analyze model.onnx --optimizer adam
FROM python:3.12-slim

COPY . /staticmem
RUN pip install --no-cache-dir /staticmem && rm -r /staticmem

# No network, no GPU and no rights are needed to read a model.
USER nobody
WORKDIR /models
ENTRYPOINT ["staticmem"]
CMD ["--help"]
